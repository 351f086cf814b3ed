"""The appendix's five labs: each claim, by counts of bytes and calls and by equal results. No clock decides."""

import importlib
import sys
from functools import partial

import book
import pytest
import torch

APPENDIX = book.ROOT / "appendix"
NAMES = ("accumulation", "precision", "checkpointing", "saving", "synchronisation")
sys.path.insert(0, str(APPENDIX))  # by their own names: one pickles its classes by it, one imports another
labs = {name: importlib.import_module(f"lab_{name}") for name in NAMES}


@pytest.fixture(scope="module")
def accumulation() -> dict:
    return labs["accumulation"].main(["--micro-batches", "1", "3", "4", "16"])


@pytest.fixture(scope="module")
def precision() -> dict:
    return labs["precision"].main([])


@pytest.fixture(scope="module")
def saving() -> dict:
    return labs["saving"].main([])


@pytest.fixture(scope="module")
def synchronisation() -> dict:
    """What two processes found, which are forks instead of new programs."""
    fork = partial(torch.multiprocessing.start_processes, start_method="forkserver")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.multiprocessing, "spawn", fork)
        return labs["synchronisation"].main([])


def test_one_count_makes_micro_batches_the_whole_batch_and_own_counts_do_not(accumulation: dict) -> None:
    for row in accumulation["rows"]:
        assert row["one_count"] < 1e-12
        assert (row["own_counts"] > 0.05) == (row["micro_batches"] > 1)
    assert accumulation["batch_norm"] > 0.01


def test_memory_falls_by_the_number_of_micro_batches_unless_backward_waits(accumulation: dict) -> None:
    peaks = {row["micro_batches"]: row for row in accumulation["rows"]}
    assert peaks[1]["peak"] / peaks[4]["peak"] == pytest.approx(4, rel=0.05)
    assert peaks[1]["peak"] / peaks[16]["peak"] == pytest.approx(
        16, rel=0.15
    )  # weights' gradients do not shrink
    assert peaks[16]["peak_at_the_end"] > peaks[1]["peak"] / 2


def test_autocast_keeps_half_the_bytes_and_float32_weights(precision: dict) -> None:
    kept = {name: sum(sizes.values()) for name, sizes in precision["bytes"].items()}
    assert 0.5 < kept["autocast"] / kept["float32"] < 0.55
    assert precision["types"]["Conv2d"] == "bfloat16"
    assert {precision["types"][name] for name in ("weight", "gradient", "mse_loss")} == {"float32"}
    assert 0 < precision["gradient_error"] < 0.01


def test_bfloat16_loses_small_updates_and_float16_small_and_large_numbers(precision: dict) -> None:
    rows = {row["type"]: row for row in precision["numbers"]}
    assert rows["bfloat16"]["1 + 2**-9"] == 1 < rows["float16"]["1 + 2**-9"]
    assert rows["float16"]["largest"] == 65_504 and rows["float16"]["70,000"] == float("inf")
    assert rows["float16"]["1e-8"] == 0 < rows["bfloat16"]["1e-8"]
    assert precision["weights"]["bfloat16"] == 1
    assert precision["weights"]["float32"] == pytest.approx(2, abs=1e-3)


def test_a_scaler_saves_small_gradients_and_skips_the_step_after_an_overflow(precision: dict) -> None:
    lost, saved, overflown = precision["scaled"].values()
    assert lost["gradient"] == 0 and saved["gradient"] == pytest.approx(1e-8, rel=1e-3)
    assert saved["weight"] == -saved["gradient"]
    assert overflown["weight"] == 0 and overflown["scale"] == saved["scale"] / 2


def test_checkpointing_gives_the_same_bits_from_fewer_bytes_and_more_calls() -> None:
    layers, found = 16, labs["checkpointing"].main(["--segments", "1", "4", "8", "16"])
    for row in found["rows"]:
        segments = row["segments"]
        assert row["equal"]
        assert row["kept"] == pytest.approx(segments - 1 + 3 * layers / segments, abs=0.1)
        assert row["calls"] == 2 * layers - layers // segments
    assert min(found["rows"], key=lambda row: row["peak"])["segments"] == 8


def test_a_run_resumes_to_the_bit_with_optimizer_and_step_alone(saving: dict) -> None:
    whole, without_step, without_optimizer = saving["differences"].values()
    assert whole == 0 and without_step > 1e-3 and without_optimizer > 1e-3


def test_files_hold_what_is_saved_and_a_view_holds_all_of_its_storage(saving: dict) -> None:
    weights, adam, row, clone = saving["sizes"].values()
    assert adam / weights == pytest.approx(3, rel=0.05)
    assert row > 4_000_000 and clone < 10_000


def test_what_a_file_can_do_and_what_it_survives(saving: dict) -> None:
    safe, unsafe, renamed, refused, ran, torn, whole, prefixed, stripped = saving["ends"].values()
    assert (safe, unsafe, renamed) == ("UnpicklingError", "works", "ModuleNotFoundError")
    assert (refused, ran) == ("does not run", "runs")
    assert torn != "works" == whole
    assert prefixed != "works" == stripped


def test_two_ranks_give_the_whole_batchs_gradient_by_one_count_only(synchronisation: dict) -> None:
    errors = {row["what"]: row["error"] for row in synchronisation["rows"]}
    wrong = errors.pop("own counts: a mean of means")
    assert max(errors.values()) < 1e-12 and wrong > 0.05


def test_a_step_sends_the_weights_bytes_once_in_buckets(synchronisation: dict) -> None:
    once, _, every, last, *buckets = synchronisation["rows"]
    assert once["bytes"] == last["bytes"] == synchronisation["weights"] == every["bytes"] / 4
    assert every["all_reduces"] == 4 * last["all_reduces"]
    assert {row["bytes"] for row in buckets} == {once["bytes"]}
    assert once["all_reduces"] == 1 < buckets[0]["all_reduces"] < buckets[1]["all_reduces"]


def test_replicas_drift_apart_without_ddp(synchronisation: dict) -> None:
    assert synchronisation["drift"]["DDP"] == 0 < synchronisation["drift"]["no DDP"]


@pytest.mark.parametrize(
    ("lab", "flags", "remedy"),
    [
        ("accumulation", "--micro-batches 17", "--micro-batches 17: the batch has 16 samples; give 1 to 16"),
        ("checkpointing", "--segments 5", "--segments 5: give numbers that divide 16"),
        ("checkpointing", "--layers 0", "--layers 0: give 1 to 100"),
        ("synchronisation", "--micro-batches 1", "--micro-batches 1: a rank has 6 samples"),
    ],
)
def test_bad_input_names_the_flag_and_the_remedy(lab: str, flags: str, remedy: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        labs[lab].main(flags.split())
    assert end.value.code == 2
    assert remedy in capsys.readouterr().err.splitlines()[-1]
