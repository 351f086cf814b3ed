"""The appendix's day on a GPU: its dry run, what it goes on with after a kill, its picture, and the page's claims."""

import json
import shutil
import sys
from pathlib import Path

import book
import programs
import pytest

APPENDIX = book.ROOT / "appendix"
SCRIPT = APPENDIX / "gpu_day.py"
sys.path.insert(0, str(APPENDIX))  # its modules import each other by name
import gpu_counters  # noqa: E402
import gpu_day  # noqa: E402
import gpu_plan  # noqa: E402
import gpu_tables  # noqa: E402

PARTS = (
    "machine ladder step exact loader wide kernels energy roofline large memory compile cpu scaling".split()
)
QUICK = "machine exact energy scaling".split()
RESULTS = "appendix/results/gpu_day_nvidia_h200.json"
DAYS = ("ladder", "ladder, a day later")
KERNELS = "appendix/results/gpu_kernels_nvidia_h200.json"


def dry_run(folder: Path, parts: list[str]) -> tuple[list[dict], str]:
    """The rows of a dry run of some parts, and what it printed."""
    flags = ["--dry-run", "--minutes", 8, "--output-dir", folder, "--parts", *parts]
    done = programs.require_success(SCRIPT, *flags, timeout=600, **programs.QUICK)
    return json.loads((folder / "dry_run.json").read_text())["rows"], done.out


def assert_each_part_is_measured(parts: list[str], rows: list[dict], printed: str) -> None:
    assert list(dict.fromkeys(row["part"] for row in rows)) == parts
    errors = [row for row in rows if "error" in row and "needs a GPU" not in row["error"]]
    assert [row for row in errors if "bfloat16" not in row["error"]] == []
    assert [part for part in parts if f"\n### {part}\n" in printed] == parts


@pytest.fixture(scope="module")
def dry(tmp_path_factory) -> tuple[list[dict], str]:
    return dry_run(tmp_path_factory.mktemp("day"), QUICK)


def test_a_dry_run_measures_something_in_the_quick_parts(dry) -> None:
    assert_each_part_is_measured(QUICK, *dry)


@pytest.mark.thorough
def test_a_dry_run_measures_something_in_each_part(tmp_path: Path) -> None:
    found, printed = dry_run(tmp_path, PARTS)
    assert_each_part_is_measured(PARTS, found, printed)
    rows = {row["part"]: row for row in found}
    assert rows["ladder"]["gpu_peak_gb"] is None
    assert rows["memory"]["predicted_gb"] > 0
    assert rows["memory"]["measured_gb"] is None


def test_runs_are_equal_to_the_bit_on_a_cpu_also_if_killed(dry) -> None:
    rows = {row["case"]: row for row in dry[0] if row["part"] == "exact"}
    for case in ("twice", "killed and resumed"):
        assert rows[f"{case}, deterministic kernels"]["equal_to_the_bit"]
    assert rows["killed and resumed, deterministic kernels"]["resumed_at"] == ["resumed_at_2"]


def test_what_a_cpu_has_no_counter_for_is_missing_and_not_0(dry) -> None:
    rows = {row["part"]: row for row in dry[0]}
    assert "missing" in rows["energy"]
    assert "missing" in rows["scaling"]


def test_a_part_that_is_killed_is_named_and_gone_on_with(tmp_path: Path) -> None:
    flags = ["--dry-run", "--output-dir", tmp_path, "--parts", "machine", "wide"]
    killed = programs.run(SCRIPT, *flags, "--minutes", "1e-6")
    assert killed.code == 1
    assert "not finished: machine, wide; the same command goes on" in killed.out
    path = tmp_path / "dry_run.json"
    measured = {"part": "wide", "case": "width 8", "parameters": -1}  # killed after its only row
    path.write_text(json.dumps({"rows": [measured], "finished": ["machine"]}))
    gone_on = programs.require_success(SCRIPT, *flags)
    assert "machine: finished before; --again repeats it" in gone_on.out
    assert json.loads(path.read_text()) == {"rows": [measured], "finished": ["machine", "wide"]}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--dry-run --parts nope", "--parts nope: no such part; choose from machine, "),
        ("--dry-run --minutes 0", "--minutes 0: give more than 0"),
        ("--dry-run --save-results", "--save-results: --dry-run finds nothing; leave one out"),
        ("--dry-run --output-dir gpu_day.py", "--output-dir gpu_day.py: "),
        ("--minutes x", "argument --minutes: invalid float value"),
        ("--draw nope.json", "--draw nope.json: No such file or directory; give a results/"),
        ("--draw gpu_day.py", "--draw gpu_day.py: "),
        ("--draw results/caches.json", "--draw results/caches.json: "),
    ],
)
def test_a_wrong_flag_ends_with_one_line_and_code_2(flags: str, says: str, monkeypatch, capsys) -> None:
    monkeypatch.chdir(APPENDIX)
    with pytest.raises(SystemExit) as end:
        gpu_day.main(flags.split())
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line


def test_a_file_of_results_is_drawn_beside_it(tmp_path: Path, capsys) -> None:
    path = Path(shutil.copy(book.ROOT / RESULTS, tmp_path))
    with pytest.raises(SystemExit) as end:
        gpu_day.main(["--draw", str(path)])
    assert end.value.code == 0
    picture = path.with_suffix(".png")
    assert capsys.readouterr().out == f"picture: {picture}\n"
    assert picture.stat().st_size > 10_000


def test_a_counter_that_is_not_there_is_none() -> None:
    assert gpu_counters.joules_between(None, 3.0) is None
    assert gpu_counters.joules_between(1.0, 3.0) == 2


def test_a_table_shows_what_a_row_lacks_as_an_empty_cell() -> None:
    spread = {"median": 1234.5, "min": 0.00001, "max": 2}
    rows = [{"part": "p", "case": "a", "x": spread}, {"part": "p", "case": "b", "y": True, "z": None}]
    lines = gpu_tables.show(rows).splitlines()
    assert lines[2] == "| case | x | y | z |"
    assert lines[4:] == ["| a | 1,234 (1.0e-05–2) |  |  |", "| b |  | yes |  |"]


def test_a_file_of_rows_is_whole_at_any_time(tmp_path: Path) -> None:
    found = gpu_plan.Found(tmp_path / "day.json")
    found.add("step", "batch 8", {"ms": 1.0})
    found.finish("step")
    again = gpu_plan.Found(tmp_path / "day.json")
    assert again.has("step", "batch 8")
    assert again.finished == ["step"]
    again.forget(["step"])
    assert not gpu_plan.Found(tmp_path / "day.json").has("step", "batch 8")


# --------------------------------------------------------------------------- what the page says of the H200


@pytest.fixture(scope="module")
def measured() -> dict[tuple[str, str], dict]:
    """The committed rows, by part and case."""
    return {(row["part"], row["case"]): row for row in book.results(RESULTS)["rows"]}


def test_on_the_h200_deterministic_kernels_made_runs_equal_to_the_bit_and_the_defaults_did_not(
    measured,
) -> None:
    for case in ("twice", "killed and resumed"):
        assert measured["exact", f"{case}, deterministic kernels"]["equal_to_the_bit"]
        assert not measured["exact", f"{case}, torch's defaults"]["equal_to_the_bit"]
    with_tf32 = measured["exact", "GPU with TF32 against CPU"]["difference"]
    assert with_tf32 > 100 * measured["exact", "GPU without TF32 against CPU"]["difference"]


def test_on_the_h200_launches_were_the_limit_of_small_batches_and_not_of_large_ones(measured) -> None:
    def step(batch: int, case: str) -> dict:
        return measured["step", f"batch {batch}: {case}"]["step_ms"]

    one_by_one, graph = "all fixes, bfloat16, batch on the GPU", "the same, one CUDA graph"
    assert step(8, one_by_one)["min"] > 2 * step(8, graph)["max"]
    assert step(512, one_by_one)["median"] < 1.1 * step(512, graph)["median"]
    eager = [name for part, name in measured if part == "step" and graph not in name]
    small = [name.partition(": ")[2] for name in eager if name.startswith("batch 8:")]
    assert all(step(32, case)["median"] < 1.15 * step(8, case)["median"] for case in small)
    for batch in (128, 512):
        fastest = step(batch, "all fixes but channels_last, bfloat16")
        assert fastest["max"] < step(batch, "all fixes, bfloat16")["min"]


def test_on_the_h200_the_chapters_were_three_to_four_times_as_fast_as_the_cores(measured) -> None:
    for chapter in ("01_setup", "06_whats_next"):
        gpu, cores = (measured[part, chapter]["samples_per_second"] for part in ("ladder", "cpu"))
        assert 2.5 < gpu / cores < 4.5


def test_on_two_h200s_one_run_each_differs_by_more_than_the_last_chapters_do(measured) -> None:
    """And a worker helped chapter 4."""
    first, later = ({case: row for (part, case), row in measured.items() if part == name} for name in DAYS)
    rates = {
        case: [day[case]["samples_per_second"] for day in (first, later)] for case in first.keys() & later
    }
    chapters = [*rates["04_data_pipeline"], *rates["05_model_profiling"]]
    assert max(rates["02_multi_gpu"]) / min(rates["02_multi_gpu"]) > max(chapters) / min(chapters)
    own, moved = (later[f"04_data_pipeline{worker}"]["samples_per_second"] for worker in ("", ", 1 worker"))
    assert moved > 1.2 * own


def test_beside_the_h200_no_loader_was_half_as_fast_as_the_step(measured) -> None:
    rows = [row for (part, _), row in measured.items() if part.startswith("loader")]
    assert len(rows) == 13
    assert all(row["samples_per_second"] < row["step_alone_samples_per_second"] / 2 for row in rows)


def test_on_the_h200_one_kernel_took_most_and_one_line_mends_it() -> None:
    rows = {row["case"]: row for row in book.results(KERNELS)["rows"] if row["part"] == "kernels"}
    mended = {case: row for case, row in rows.items() if case.endswith("upsampling in channels_last")}
    assert len(mended) == 3
    for case, after in mended.items():
        before = rows[case.removesuffix(", upsampling in channels_last")]
        slow = before["operators_ms"]["aten::upsample_bilinear2d"]
        assert slow == max(before["operators_ms"].values())
        assert 0.36 < slow / before["step_ms"] < 0.5
        assert before["step_ms"] > 1.49 * after["step_ms"]


def test_on_the_h200_preflight_predicted_too_little_memory_by_a_fifth_at_most(measured) -> None:
    for precision in ("32-true", "bf16-mixed"):
        row = measured["memory", precision]
        assert 0.8 < row["predicted_gb"] / row["measured_gb"] < 1


def test_on_the_h200_the_fixes_saved_energy(measured) -> None:
    joules = [
        measured["energy", case]["joules_per_1000_samples"]
        for case in ("float32", "TF32", "all fixes, bfloat16")
    ]
    assert joules[0]["min"] > joules[1]["max"] > joules[1]["min"] > joules[2]["max"]
