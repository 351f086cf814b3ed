"""Chapter 5's roofline: what it counts, and that its shares and floors follow from it."""

from collections.abc import Iterator

import book
import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def rooms() -> Iterator[None]:
    """The chapter's modules, under their own names while these tests run."""
    global roofline, step
    with book.rooms("05_model_profiling"):
        import roofline
        import step

        yield


def test_flops_and_bytes_of_a_convolution_are_counted() -> None:
    """Two FLOPs a product; what it reads and writes, once each. A view moves nothing."""
    convolution = torch.nn.Conv2d(3, 8, 3, padding=1, bias=False)
    image = torch.ones(2, 3, 10, 12)

    def work() -> torch.Tensor:
        with torch.no_grad():
            return convolution(image).view(-1)

    found = roofline.count(work)
    assert found["flops"] == 2 * (2 * 8 * 10 * 12) * (3 * 3 * 3)
    assert found["bytes"] == 4 * (image.numel() + 8 * 3 * 9 + 2 * 8 * 10 * 12)


def test_ceilings_are_those_of_the_fastest_call(monkeypatch) -> None:
    monkeypatch.setattr(roofline, "SIZE", roofline.QUICK)
    monkeypatch.setattr(roofline, "fastest", lambda *_: 2.0)
    ceilings = roofline.measure_ceilings(CPU)
    assert ceilings["float32"] == 128**3  # 2 n^3 FLOPs in two seconds
    assert ceilings["memory"] == 2**20
    clock = iter([0, 9, 9, 18, 18, 21, 21, 23, 23, 24])  # two that do not count: 9 seconds each
    monkeypatch.undo()
    monkeypatch.setattr(roofline, "perf_counter", lambda: next(clock))
    assert roofline.fastest(lambda: None, CPU, 3) == 1


def test_a_step_has_three_times_the_flops_of_its_forward_pass() -> None:
    """Backward computes the gradients of weights and inputs, but not that of the first input."""
    batch = step.make_batch(4, 16)
    each = step.Step(step.Fixes(), batch, CPU)
    forward = roofline.count(lambda: each.network(batch["input"]))["flops"]
    whole = roofline.count(each)["flops"]
    assert 2.9 < whole / forward < 3


def test_shares_and_floors_follow_from_the_ceilings(monkeypatch) -> None:
    monkeypatch.setattr(roofline, "SIZE", roofline.QUICK)
    ceilings = {"float32": 1e12, "bfloat16": 2e12, "memory": 1e10}
    rows = roofline.measure_steps(CPU)
    roofline.compare(rows, ceilings)
    for row in rows:
        ceiling = ceilings[row["precision"]]
        assert row["floor_of_flops"] == row["flops"] / ceiling
        assert row["floor_of_bytes"] == row["bytes"] / 1e10
        assert row["mfu"] == pytest.approx(row["floor_of_flops"] / row["seconds"]["min"])


def test_the_quick_form_prints_ceilings_and_steps(monkeypatch, capsys) -> None:
    monkeypatch.setattr(roofline, "SIZE", dict(roofline.SIZE))
    found = roofline.main(["--quick"])
    assert {"float32", "memory"} <= found["ceilings"].keys()
    printed = capsys.readouterr().out
    assert "GB/s" in printed and "chapter 4's step: " in printed and "of the ceiling" in printed
    assert isinstance(roofline.plot_roofline(found["ceilings"], found["steps"]), roofline.Figure)


def test_quick_results_are_not_saved(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        roofline.main(["--quick", "--save-results"])
    assert "--save-results: --quick finds nothing" in capsys.readouterr().err
