"""Chapter 5's fixes: the exact ones change nothing, each does what its name says, and none waits for the device."""

import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import book
import programs
import pytest
import torch
from operators import Calls

thorough = pytest.mark.thorough
CPU = torch.device("cpu")
EXACT = {
    "one scaling": {"one_scaling": True},
    "fused optimizer": {"fused_optimizer": True},
    "channels last": {"channels_last": True},
    "computed again": {"checkpointed": True},
    "micro-batches": {"micro_batches": 2},
    "all": {
        "one_scaling": True,
        "fused_optimizer": True,
        "channels_last": True,
        "checkpointed": True,
        "micro_batches": 2,
    },
}


@pytest.fixture(scope="module", autouse=True)
def rooms() -> Iterator[None]:
    """The chapter's modules, under their own names while these tests run."""
    global energy, fixes, model, options, step
    with book.rooms("05_model_profiling"):
        import energy
        import fixes
        import model
        import options
        import step

        yield


@pytest.fixture
def batch():
    return step.make_batch(4, 16)


def weights_after(count: int, batch: dict, **changes: object) -> torch.Tensor:
    """All weights after some steps in double precision, which rounding does not blur."""
    each = step.Step(step.Fixes(**changes), batch, CPU, torch.float64)
    for _ in range(count):
        each()
    return torch.cat([parameter.detach().flatten() for parameter in each.network.parameters()])


@pytest.mark.parametrize("padding", [False, True], ids=["replicate", "zeros"])
@pytest.mark.parametrize("name", EXACT)
def test_exact_fixes_end_at_the_same_weights(name: str, padding: bool, batch: dict) -> None:
    plain = weights_after(3, batch, zero_padding=padding)
    fixed = weights_after(3, batch, zero_padding=padding, **EXACT[name])
    torch.testing.assert_close(fixed, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", EXACT)
def test_exact_fixes_have_the_gradients_of_float32(name: str, batch: dict) -> None:
    changes = step.Fixes(**EXACT[name])
    assert step.gradient_difference(changes, batch, CPU) < 1e-5


def test_padding_and_bfloat16_are_not_exact(batch: dict) -> None:
    """So the tests above can fail, and these two are judged by RMSE."""
    plain = weights_after(1, batch)
    assert (weights_after(1, batch, zero_padding=True) - plain).abs().max() > 1e-4
    assert step.gradient_difference(step.Fixes(bf16=True), batch, CPU) > 1e-3


@thorough
def test_a_compiled_step_ends_at_the_same_weights_and_compiles_once(batch: dict) -> None:
    plain = weights_after(3, batch, zero_padding=True)
    fixed = weights_after(3, batch, zero_padding=True, compiled=True)
    torch.testing.assert_close(fixed, plain, rtol=1e-9, atol=1e-9)
    with torch.compiler.set_stance("fail_on_recompile"):
        weights_after(3, batch, zero_padding=True, compiled=True)


@pytest.mark.parametrize(("changes", "at_most"), [({"checkpointed": True}, 0.9), ({"micro_batches": 2}, 0.6)])
def test_fixes_of_memory_hold_less(changes: dict, at_most: float) -> None:
    batch = step.make_batch(8, 32)
    peaks = []
    for fixes_of in ({}, changes):
        each = step.Step(step.Fixes(**fixes_of), batch, CPU)
        each()
        peaks.append(max(step.held_bytes(each)))
    assert peaks[1] < at_most * peaks[0]


def test_what_a_step_holds_is_counted_in_bytes(batch: dict) -> None:
    """The fine level alone keeps five outputs of 24 channels; in the end only the gradients are left."""
    each = step.Step(step.Fixes(), batch, CPU)
    each()
    held = step.held_bytes(each)
    one_output = 4 * 24 * 16 * 16 * 4
    assert 5 * one_output < max(held) < 50 * one_output
    gradients = sum(parameter.numel() * 4 for parameter in each.network.parameters())
    assert gradients <= held[-1] < 1.05 * gradients


def test_each_switch_acts(batch: dict) -> None:
    """An exact fix that does nothing would pass the tests of exactness."""
    last = torch.channels_last
    for switch in (False, True):
        each = step.Step(
            step.Fixes(channels_last=switch, fused_optimizer=switch, plain_norm=switch), batch, CPU
        )
        assert each.network.down2[0].weight.is_contiguous(memory_format=last) == switch
        assert bool(each.optimizer.defaults["fused"]) == switch
        assert each.network.down2[1].plain_order == switch
        with Calls() as calls:
            step.Step(step.Fixes(one_scaling=switch), batch, CPU).compute_gradients()
        assert ("aten::_foreach_mul_" in calls.names) == switch


@pytest.mark.parametrize(
    ("dtype", "plain_order"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False), (torch.bfloat16, True)],
)
def test_groupnorm_changes_the_order_of_memory_in_bfloat16_only(
    dtype: torch.dtype, plain_order: bool
) -> None:
    norm = model.GroupNorm(2, 4).to(dtype)
    norm.plain_order = plain_order
    inputs = torch.randn(2, 4, 8, 8).to(dtype, memory_format=torch.channels_last)
    with Calls() as calls:
        outputs = norm(inputs)
    copied = calls.names.count("aten::clone")
    assert copied == (2 if plain_order and dtype == torch.bfloat16 else 0)
    assert outputs.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(outputs, torch.nn.GroupNorm(2, 4).to(dtype)(inputs))
    assert model.GroupNorm.plain_order


@pytest.mark.parametrize("fault", [False, True])
def test_no_step_by_hand_reads_a_value(fault: bool, batch: dict) -> None:
    each = step.Step(step.Fixes(one_scaling=True, fused_optimizer=True, loss_read=fault), batch, CPU)
    each()
    with Calls() as calls:
        each()
    assert calls.reads == fault


def test_the_models_own_step_reads_no_value(batch: dict, monkeypatch) -> None:
    """Forward, backward, the scaling and the optimizer, as Lightning calls them."""
    module = model.FillGaps([2.0, 3.0], {"m/s": [0, 1]}, 1e-3, 10, seed=0)
    module.on_train_start()
    optimizer = module.configure_optimizers()["optimizer"]
    trainer = SimpleNamespace(world_size=1, accumulate_grad_batches=1)
    monkeypatch.setattr(model.FillGaps, "trainer", trainer)
    monkeypatch.setattr(module, "log", lambda *_, **__: None)
    for _ in range(2):
        with Calls() as calls:
            module.training_step(batch, 0).backward()
            module.on_before_optimizer_step(optimizer)
            optimizer.step()
            optimizer.zero_grad()
    assert calls.reads == 0


def test_the_model_has_the_exact_fixes() -> None:
    module = model.FillGaps([2.0, 3.0], {"m/s": [0, 1]}, 1e-3, 10, seed=0)
    kernels = module.model.down2[0].weight
    assert kernels.is_contiguous(memory_format=torch.channels_last)
    assert module.configure_optimizers()["optimizer"].defaults["fused"]


def test_the_ladder_has_each_fix_alone_and_then_one_more_at_a_time(monkeypatch) -> None:
    """The last rung on a CPU that has bfloat16 is the best step; without, that step lacks bfloat16 only."""
    ladder = fixes.make_ladder(CPU)
    plain = step.Fixes()
    before = plain
    for (group, _), rung in ladder.items():
        if group == "alone":
            assert differences(rung, plain) == 1
        if group == "stacked":
            assert differences(rung, before) == 1
            before = rung
    monkeypatch.setattr(fixes, "has_bf16", lambda on_gpu: True)
    best = fixes.best_fixes(CPU)
    assert best in ladder.values()
    monkeypatch.setattr(fixes, "has_bf16", lambda on_gpu: False)
    assert differences(fixes.best_fixes(CPU), best) == 1


def differences(one: object, other: object) -> int:
    return sum(vars(one)[name] != vars(other)[name] for name in vars(one))


@pytest.mark.parametrize(("seconds", "flag"), [(0.5, "bf16-mixed"), (1.0, "32-true"), (4.0, "32-true")])
def test_bfloat16_is_judged_by_its_time(seconds: float, flag: str) -> None:
    rows = [
        {"group": "stacked", "rung": fixes.NAMES["zero_padding"], "seconds": {"median": 1.0}},
        {"group": "stacked", "rung": fixes.NAMES["plain_norm"], "seconds": {"median": seconds}},
    ]
    assert fixes.judge_bf16(rows).endswith(f"--precision {flag}")


@pytest.mark.parametrize("has", [False, True])
def test_without_instructions_for_bfloat16_it_trains_in_float32_and_says_so(
    has: bool, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has, "amx_bf16": False})
    flags = ["--accelerator", "cpu", "--precision", "bf16-mixed"]
    parsed = options.parse_options("", flags)
    assert parsed.precision == ("bf16-mixed" if has else "32-true")
    note = "have no instructions for bfloat16; training in float32"
    assert (note in capsys.readouterr().err) != has
    reason = fixes.why_not(step.Fixes(bf16=True), CPU)
    assert reason == (None if has else "not run: no instructions for bfloat16")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("nope", "nope: no such study; choose from ladder, batch, memory, rmse"),
        ("--repeats 0", "--repeats 0: give at least 1"),
        ("--quick --save-results", "--save-results: --quick finds nothing worth keeping"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(flags: str, message: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr(fixes, "STUDIES", dict.fromkeys(fixes.STUDIES))  # calling one would fail
    with pytest.raises(SystemExit, match="2"):
        fixes.main(flags.split())
    assert message in capsys.readouterr().err.splitlines()[-1]


@thorough
def test_the_quick_form_of_the_studies(capsys, monkeypatch) -> None:
    monkeypatch.setattr(fixes, "SIZE", dict(fixes.SIZE))
    found = fixes.main(["--quick", "--repeats", "1"])
    assert found.keys() == fixes.STUDIES.keys()
    rungs = {(row["group"], row["rung"]) for row in found["ladder"]}
    assert rungs == set(fixes.make_ladder(CPU))
    reasons = [row["error"] for row in found["ladder"] if row["rung"] in ("TF32", "CUDA graph")]
    if not torch.cuda.is_available():
        assert set(reasons) == {"not run: needs a GPU"}
    assert {row["padding"] for row in found["rmse"]} == {"replicate", "zeros"}
    assert "bfloat16" in capsys.readouterr().out


def test_memory_that_is_kept_is_not_asked_for_anew(tmp_path: Path) -> None:
    """Pages that the system hands out for 64 MiB: thousands, or 32 where they are huge."""
    if not step.IS_GLIBC:
        pytest.skip("needs glibc")
    for kept in (False, True):
        process = programs.CONTEXT.Process(target=count_new_pages, args=(kept, tmp_path / "pages"))
        process.start()
        process.join(programs.LIMIT)
        assert (int((tmp_path / "pages").read_text()) > 16) != kept


def count_new_pages(kept: bool, target: Path) -> None:
    """In a process of its own: what other tests have freed in this one would be used again."""
    with book.rooms("05_model_profiling"):
        import step

        step.keep_memory(kept)
        pages = min(new_pages() for _ in range(5))  # something small may have split what was kept
    target.write_text(str(pages))


def new_pages() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_codecarbon_is_asked_for_where_it_is_missing(capsys, monkeypatch) -> None:
    monkeypatch.setattr(energy.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        energy.main([])
    assert "uv run --with codecarbon python energy.py" in capsys.readouterr().err.splitlines()[-1]


def test_joules_are_for_a_thousand_samples_and_say_whether_they_are_measured(capsys, monkeypatch) -> None:
    class Meter:
        def measure(self, step: object, count: int) -> dict[str, float]:
            return {"cpu": 8.0 * count, "memory": 4.0 * count, "gpu": 0.0}

    monkeypatch.setattr(energy, "Meter", Meter)
    monkeypatch.setattr(energy.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(energy, "SIZE", {"batch": 4, "patch": 16, "seconds": 0.0})
    for row in energy.main(["--repeats", "1"]):
        assert row["cpu"]["median"] == 2000  # 8 J for a step of 4
        assert row["total"]["median"] == 3000
        assert row["sources"]["memory"] == "estimated"
    assert "3000 J for 1,000 samples" in capsys.readouterr().out
