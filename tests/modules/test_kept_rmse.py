"""An RMSE that later runs read: whole, or computed anew."""

import json
import subprocess
import sys
from pathlib import Path

import kept_rmse
import pytest
from kept_rmse import keep, read

UNIT = "m/s"
BROKEN = ['{"m/s": 0}', '{"m/s": -3}', '{"m/s": 1' + 400 * "0" + "}", 100_000 * "["]


@pytest.mark.parametrize("text", ["", '{"m/s": 0.9', '{"K": 0.9}', '{"m/s": NaN}', "[0.9]", "\x00", *BROKEN])
def test_a_corrupt_file_is_not_used_and_a_note_says_so(text: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "kept.json"
    path.write_text(text)
    assert read(path, [UNIT]) is None
    assert "kept.json cannot be used" in capsys.readouterr().out
    keep(path, {UNIT: 0.9})
    assert read(path, [UNIT]) == {UNIT: 0.9}


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def die(path: Path, text: str) -> None:
        write(path, text[:4])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", die)
        keep(tmp_path / "kept.json", {UNIT: 0.9})
    assert not (tmp_path / "kept.json").exists()


def test_two_processes_at_once_write_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    write = f"import kept_rmse, pathlib; path = pathlib.Path({str(path)!r})\n"
    write += "for turn in range(500): kept_rmse.keep(path, dict.fromkeys(map(str, range(300)), {number}))"
    command = [sys.executable, "-c"]
    quiet = {"cwd": Path(kept_rmse.__file__).parent, "stdout": subprocess.DEVNULL}
    processes = [subprocess.Popen([*command, write.replace("{number}", number)], **quiet) for number in "12"]
    found = set()
    while any(process.poll() is None for process in processes):
        if path.exists():
            rmse = json.loads(path.read_text())
            assert len(rmse) == 300
            found.add(rmse["0"])
    assert [process.returncode for process in processes] == [0, 0]
    assert found == {1, 2}
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_place_to_keep_it_a_note_says_so(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").touch()
    keep(tmp_path / "file/folder/kept.json", {UNIT: 0.9})
    assert "; the next run computes it again" in capsys.readouterr().out
