"""Chapter 5's fixes: the exact ones change nothing, each does what its name says, and none waits for the device."""

import resource
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import book
import programs
import pytest
import torch
from operators import Calls

thorough = pytest.mark.thorough
CPU = torch.device("cpu")
LAST = torch.channels_last
EXACT = dict.fromkeys(["one_scaling", "fused_optimizer", "channels_last", "checkpointed"], True)
EXACT |= {"micro_batches": 2}


@pytest.fixture(scope="module", autouse=True)
def rooms() -> Iterator[None]:
    """The chapter's modules, under their own names while these tests run."""
    global energy, fixes, memory_curve, model, options, roofline, slowdowns, step
    with book.rooms("05_model_profiling"):
        import energy
        import fixes
        import memory_curve
        import model
        import options
        import roofline
        import slowdowns
        import step

        yield


@pytest.fixture
def batch():
    return step.make_batch(4, 16)


@pytest.fixture
def module():
    return model.FillGaps([2.0, 3.0], {"m/s": [0, 1]}, 1e-3, 10, seed=0)


def weights_after(count: int, batch: dict, **changes: object) -> torch.Tensor:
    """All weights after some steps in double precision, which rounding does not blur."""
    each = step.Step(step.Fixes(**changes), batch, CPU, torch.float64)
    for _ in range(count):
        each()
    return torch.cat([parameter.detach().flatten() for parameter in each.network.parameters()])


@pytest.mark.parametrize("padding", [False, True], ids=["replicate", "zeros"])
@pytest.mark.parametrize("names", [*([name] for name in EXACT), list(EXACT)], ids="-".join)
def test_exact_fixes_have_the_gradients_and_weights_of_the_plain_step(
    names: list[str], padding: bool, batch: dict
) -> None:
    changes = {name: EXACT[name] for name in names}
    plain = weights_after(3, batch, zero_padding=padding)
    fixed = weights_after(3, batch, zero_padding=padding, **changes)
    torch.testing.assert_close(fixed, plain, rtol=1e-9, atol=1e-9)
    assert step.gradient_difference(step.Fixes(zero_padding=padding, **changes), batch, CPU) < 1e-5


def test_padding_and_bfloat16_are_not_exact(batch: dict) -> None:
    """So the test above can fail, and these two are judged by RMSE."""
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


def held(**changes: object) -> list[int]:
    each = step.Step(step.Fixes(**changes), step.make_batch(8, 32), CPU)
    each()
    return memory_curve.measure_memory(each).bytes_held


def test_fixes_of_memory_hold_less() -> None:
    """The fine level alone keeps five outputs of 24 channels; in the end only the gradients are left."""
    plain = held()
    one_output = 8 * 24 * 32 * 32 * 4
    assert 5 * one_output < max(plain) < 50 * one_output
    gradients = sum(parameter.numel() * 4 for parameter in model.UNet(2, "zeros", 24).parameters())
    assert gradients <= plain[-1] < 1.05 * gradients
    assert max(held(checkpointed=True)) < 0.9 * max(plain)
    assert max(held(micro_batches=2)) < 0.6 * max(plain)


@pytest.mark.parametrize("on", [False, True])
def test_each_switch_acts(on: bool, batch: dict) -> None:
    """An exact fix that does nothing would pass the tests of exactness."""
    names = ["one_scaling", "fused_optimizer", "channels_last", "plain_norm"]
    each = step.Step(step.Fixes(**dict.fromkeys(names, on)), batch, CPU)
    assert each.network.down2[0].weight.is_contiguous(memory_format=LAST) == on
    assert bool(each.optimizer.defaults["fused"]) == on
    assert each.network.down2[1].plain_order == on
    with Calls() as calls:
        each.compute_gradients()
    assert ("aten::_foreach_mul_" in calls.names) == on


@pytest.mark.parametrize("fault", [False, True])
def test_no_step_by_hand_reads_a_value(fault: bool, batch: dict) -> None:
    each = step.Step(step.Fixes(one_scaling=True, fused_optimizer=True, loss_read=fault), batch, CPU)
    with Calls() as calls:
        each()
    assert calls.reads == fault


@pytest.mark.parametrize("plain_order", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groupnorm_changes_the_order_of_memory_in_bfloat16_only(
    dtype: torch.dtype, plain_order: bool
) -> None:
    norm = model.GroupNorm(2, 4).to(dtype)
    assert norm.plain_order
    norm.plain_order = plain_order
    inputs = torch.randn(2, 4, 8, 8).to(dtype, memory_format=LAST)
    with Calls() as calls:
        outputs = norm(inputs)
    assert calls.names.count("aten::clone") == (2 if plain_order and dtype == torch.bfloat16 else 0)
    assert outputs.is_contiguous(memory_format=LAST)
    torch.testing.assert_close(outputs, torch.nn.GroupNorm(2, 4).to(dtype)(inputs))


def test_the_models_own_step_has_the_exact_fixes_and_reads_no_value(module, batch: dict, monkeypatch) -> None:
    """Forward, backward, the scaling and the optimizer, as Lightning calls them."""
    module.on_train_start()
    optimizer = module.configure_optimizers()["optimizer"]
    assert optimizer.defaults["fused"]
    assert module.model.down2[0].weight.is_contiguous(memory_format=LAST)
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
    assert "aten::_foreach_mul_" in calls.names


@pytest.mark.parametrize("has", [False, True])
def test_the_ladder_has_each_fix_alone_and_then_one_more_at_a_time(has: bool, monkeypatch) -> None:
    """The last rung on a CPU that has bfloat16 is the best step; without, that step lacks bfloat16 only."""
    monkeypatch.setattr(fixes, "has_bf16", lambda on_gpu: has)
    before, *rungs = ladder = {rung: asdict(each).items() for rung, each in fixes.make_ladder(CPU).items()}
    for rung in rungs:
        assert len(ladder[rung] - ladder[before]) == 1
        before = rung if rung[0] == "stacked" else before
    best = asdict(fixes.best_fixes(CPU)).items()
    assert min(len(best - each) for each in ladder.values()) == (not has)


@pytest.mark.parametrize(("seconds", "flag"), [(0.5, "bf16-mixed"), (1.0, "32-true")])
def test_bfloat16_is_judged_by_its_time(seconds: float, flag: str) -> None:
    rows = []
    for name, median in {"zero_padding": 1.0, "plain_norm": seconds}.items():
        rows.append({"group": "stacked", "rung": fixes.NAMES[name], "seconds": {"median": median}})
    assert fixes.judge_bf16(rows).endswith(f"--precision {flag}")


@pytest.mark.parametrize("has", [False, True])
def test_without_instructions_for_bfloat16_it_trains_in_float32_and_says_so(
    has: bool, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has, "amx_bf16": False})
    parsed = options.parse_options("", ["--accelerator", "cpu", "--precision", "bf16-mixed"])
    assert parsed.precision == ("bf16-mixed" if has else "32-true")
    note = "have no instructions for bfloat16; training in float32"
    assert (note in capsys.readouterr().err) != has
    reason = fixes.why_not(step.Fixes(bf16=True), CPU)
    assert reason == (None if has else "not run: no instructions for bfloat16")


@pytest.mark.parametrize(
    ("program", "flags", "message"),
    [
        ("fixes", "nope", "nope: no such study; choose from ladder, batch, memory, rmse"),
        ("fixes", "--repeats 0", "--repeats 0: give at least 1"),
        ("roofline", "--quick --save-results", "--save-results: --quick finds nothing"),
        ("energy", "", "uv run --with codecarbon python energy.py"),
        ("slowdowns", "nope", "nope: no such slow-down; choose from control"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    program: str, flags: str, message: str, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(energy.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        globals()[program].main(flags.split())
    assert message in capsys.readouterr().err.splitlines()[-1]


@thorough
def test_the_quick_form_of_the_studies(monkeypatch) -> None:
    monkeypatch.setattr(fixes, "SIZE", dict(fixes.SIZE))
    found = fixes.main(["--quick", "--repeats", "1"])
    assert found.keys() == fixes.STUDIES.keys()
    assert {(row["group"], row["rung"]) for row in found["ladder"]} == set(fixes.make_ladder(CPU))
    reasons = [row.get("error") for row in found["ladder"] if row["rung"] in ("TF32", "CUDA graph")]
    assert set(reasons) == {"not run: needs a GPU"} or torch.cuda.is_available()
    assert {row["padding"] for row in found["rmse"]} == {"replicate", "zeros"}


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


# ------------------------------------------------------------------------------------------ the roofline


def test_flops_and_bytes_of_a_convolution_are_counted() -> None:
    """Two FLOPs a product; what it reads and writes, once each. A view moves nothing."""
    convolution = torch.nn.Conv2d(3, 8, 3, padding=1, bias=False).requires_grad_(False)
    image = torch.ones(2, 3, 10, 12)
    found = roofline.count(lambda: convolution(image).view(-1))
    assert found["flops"] == 2 * (2 * 8 * 10 * 12) * (3 * 3 * 3)
    assert found["bytes"] == 4 * (image.numel() + 8 * 3 * 9 + 2 * 8 * 10 * 12)


def test_ceilings_shares_and_floors_follow_from_the_fastest_call(monkeypatch) -> None:
    clock = iter([0, 9, 9, 18, 18, 21, 21, 23, 23, 24])  # two that do not count: 9 seconds each
    with monkeypatch.context() as patch:
        patch.setattr(roofline, "perf_counter", lambda: next(clock))
        assert roofline.fastest(lambda: None, CPU, 3) == 1
    monkeypatch.setattr(roofline, "SIZE", dict(roofline.SIZE))
    monkeypatch.setattr(roofline, "fastest", lambda *_: 2.0)
    found = roofline.main(["--quick"])
    ceilings = found["ceilings"]
    assert ceilings["float32"] == 128**3  # 2 n^3 FLOPs in two seconds
    assert ceilings["memory"] == 2**20  # read and written
    for row in found["steps"]:
        assert row["floor_of_flops"] == row["flops"] / ceilings[row["precision"]]
        assert row["floor_of_bytes"] == row["bytes"] / ceilings["memory"]
        assert row["mfu"] == pytest.approx(row["floor_of_flops"] / row["seconds"]["min"])
    assert isinstance(roofline.plot_roofline(ceilings, found["steps"]), roofline.Figure)
