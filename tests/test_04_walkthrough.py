"""Chapter 4 as a reader meets it: its commands, its programs' help and its committed results."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import book
import programs
import pytest
from test_03_cloud_data import buckets, processes, winds  # noqa: F401  (fixtures)

CHAPTER = book.ROOT / "04_data_pipeline"
README = CHAPTER / "README.md"


def test_every_command_of_the_walkthrough_runs(tmp_path: Path) -> None:
    commands = [line.removeprefix("uv run python ").split() for line in book.commands(README)]
    assert {command[0] for command in commands} >= {"train.py", "diagnose.py", "tune.py"}
    few = {"train.py": ["--max-steps", 4, "--output-dir", tmp_path], "diagnose.py": ["--steps", 2]}
    few["tune.py"] = ["--help"]  # its search is tested elsewhere
    for script, *flags in commands:
        done = programs.require_success(f"04_data_pipeline/{script}", *flags, *few[script])
        assert script != "train.py" or "U-Net after 4 steps" in done.out
        assert script != "diagnose.py" or "best speed-up that work on data could give" in done.out


def test_the_readers_command_prints_what_the_walkthrough_shows() -> None:
    assert "uv run python train.py" in book.commands(README)
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "train.py"], cwd=CHAPTER, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    assert done.returncode == 0, done.stderr
    # But for the speed and the last digits of the RMSE.
    pattern = (
        r"U-Net after 150 steps +([\d.]+).*?store: ([\d.]+) requests a sample, ([\d.]+) bytes read for each"
    )
    now, shown = (re.search(pattern, text, re.DOTALL).groups() for text in (done.stdout, README.read_text()))
    assert [*map(float, now)] == pytest.approx([*map(float, shown)], abs=0.11)
    waited = float(re.search(r"([\d.]+)% of the time waiting for data", done.stdout).group(1))
    assert waited < 10  # a busy machine; the walkthrough shows less
    assert programs.in_time(seconds, 90)
    assert "warning" not in done.stderr.lower()
    folder = book.ROOT / "03_cloud_data/outputs"
    programs.wait_for(lambda: not processes(f"local_s3.py --folder {folder}"), 5, "the server's end")


def test_the_script_for_a_project_of_ones_own_reads_what_it_promises(buckets, tmp_path: Path) -> None:
    _, _, text = README.read_text().partition("\n## In your own project\n")
    code = text.partition("```python\n")[2].partition("```")[0]
    settings = {"s3://bucket/mine.zarr": str(buckets / "bucket/v3.zarr"), " 64,": " 16,", "1000": "20"}
    for shown, small in settings.items():
        assert code.count(shown) == 1
        code = code.replace(shown, small)
    code = code.replace("    wind,", "    print(*batch['wind'].shape, *batch['chance'].shape)\n    wind,")
    for name in ("loader.py", "object_store.py"):
        shutil.copy(CHAPTER / name, tmp_path)
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run([sys.executable, "-c", code], **options)
    assert done.returncode == 0 and "Task was" not in done.stderr, done.stderr
    lines = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(lines) == 20 and lines[0][:5] == [32, 2, 16, 16, 32]
    u, v = '"10m_u_component_of_wind"', '"10m_v_component_of_wind"'
    for some in (u, f"{u}, {v}, {u}"):
        other = code.replace(f"{u}, {v}", some) + "\nprint(*scale['mean'].shape)"
        done = subprocess.run([sys.executable, "-c", other], **options)
        count = some.count("_u_") + some.count("_v_")
        assert done.returncode == 0 and done.stdout.startswith(f"32 {count} 16 16 32"), done.stderr
        assert done.stdout.endswith(f"\n{count} 1 1\n")


def test_the_notebook_runs_with_reduced_settings() -> None:
    notebook = book.execute(CHAPTER / "notebook.ipynb", {"STEPS": 3}, timeout=600)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 11


SCRIPTS = [
    "train",
    "diagnose",
    "tune",
    "benchmark",
    "compare",
    "dashboard",
    "object_store",
    "make_references",
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_the_program_is_for(script: str) -> None:
    done = programs.require_success(f"04_data_pipeline/{script}.py", "--help")
    assert re.search("Chapter [34]", done.out)


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_unknown_flag_is_one_line(script: str) -> None:
    refused = programs.run(f"04_data_pipeline/{script}.py", "--no-such-flag")
    assert refused.code == 2
    assert refused.err.startswith(f"{script}.py: error: ") and refused.err.count("\n") == 1, refused.err


def test_a_picture_of_the_dashboard_needs_a_browser(monkeypatch, tmp_path: Path) -> None:
    refused = programs.run(
        "04_data_pipeline/dashboard.py", "--capture", tmp_path / "a.png", environment={"PATH": str(tmp_path)}
    )
    assert refused.code == 2 and "no Chromium here; leave the flag out" in refused.err, refused.err
    assert not list(tmp_path.iterdir())


def test_a_picture_of_the_dashboard_needs_a_folder(tmp_path: Path) -> None:
    (tmp_path / "chromium").touch(0o755)
    flags, environment = ["--capture", tmp_path / "none/a.png"], {"PATH": str(tmp_path)}
    refused = programs.run("04_data_pipeline/dashboard.py", *flags, environment=environment)
    assert refused.code == 2 and refused.err.endswith("none/a.png: no such folder\n"), refused.err


def rows(name: str, **keys: object) -> list[dict]:
    found = book.results(f"04_data_pipeline/results/{name}.json")["rows"]
    return [row for row in found if all(row.get(key) == value for key, value in keys.items())]


def speed(name: str, **keys: object) -> float:
    (row,) = rows(name, **keys)
    return row["samples_per_second"]["median"]


def test_the_loader_is_thirty_times_the_naive_one_and_near_the_limit() -> None:
    naive = speed("ladder", step="naive: isel().load(), a sample after another")
    assert speed("ladder", step="blocks, imports spared by the garbage collector") > 30 * naive
    limit = speed("ladder", kind="limit")
    assert speed("ladder", step="blocks, 256 requests in flight") > 0.8 * limit  # made ready, too
    assert speed("ladder", kind="gets") > limit  # so the server could give more
    assert speed("cut", cut="128 x 128", kind="blocks") > 0.8 * speed("cut", cut="128 x 128", kind="limit")


def test_it_is_ahead_of_the_peers() -> None:
    others = [row for row in rows("compare") if row["alternative"] not in ("limit", "gets") and row["rounds"]]
    best = max(others, key=lambda row: row["samples_per_second"]["median"])
    assert best["alternative"] == "ours"
    of_the_store = [row for row in others if row["layout"] == "1x128x128"]
    ours = max(of_the_store, key=lambda row: row["samples_per_second"]["median"])
    assert ours["alternative"] == "ours"
    # With small chunks readers of copies may be ahead: then the text names them, all of them and no others.
    copies = [row for row in others if row["layout"] == "own copy"]
    slower = ours["samples_per_second"]["median"]
    ahead = {row["alternative"] for row in copies if row["samples_per_second"]["median"] > slower}
    text = (CHAPTER / "README.md").read_text()
    (said,) = re.findall(
        r"^\*\*Of those that read a copy\*\*, ([^{]*?) (?:are|is) ahead of ours", text, re.MULTILINE
    )
    assert set(said.split(" and ")) - {"none"} == ahead


def test_training_does_not_wait_and_memory_is_flat() -> None:
    for row in rows("steady", kind="blocks"):
        assert row["steps"] == 1000
        assert row["wait_share"]["median"] < 0.03
        assert abs(row["memory_mb_per_1000_steps"]["median"]) < 50


def test_the_naive_loader_keeps_training_waiting() -> None:
    (near,), (far,) = (rows("steady", kind="naive", place=place) for place in ("30 ms", "100 ms"))
    assert near["wait_share"]["median"] > 0.6 and far["wait_share"]["median"] > 0.8


def test_the_walkthroughs_commands_end_in_90_seconds() -> None:
    for row in rows("command"):
        assert row["wall_seconds"]["max"] < 90, row["run"]


def test_a_diagnosis_promises_what_blocks_then_bring() -> None:
    for row in rows("diagnosis"):
        if "speedup" in row:
            assert row["kind"] != "naive" or row["verdict"] == "data-bound"
            assert row["measured_speedup"] == pytest.approx(row["speedup"]["median"], rel=0.15), row["kind"]


def test_predictions_come_true() -> None:
    for row in rows("optimum"):
        if "predicted" in row:
            assert abs(row["predicted"] - row["best"]) <= 1, row
