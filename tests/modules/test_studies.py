"""Chapter 6's studies, and what is committed of them."""

import re
from pathlib import Path

import book
import optuna
import pytest
from studies import plan_check, rehearsal, saving, search_check
from tracking import diary

RESULTS = book.ROOT / "06_whats_next/results"


@pytest.mark.thorough
def test_the_measurement_of_saves_runs(capsys: pytest.CaptureFixture[str]) -> None:
    saving.main(["--repeats", "1"])
    assert capsys.readouterr().out.count("it costs 2%") == 2


def told_of_faults(texts: list[str]) -> tuple:
    """What a diary tells: the batches that each new start leaves out, how often rank 1 is slow, and the end of both."""
    starts = [text for text in texts if text.startswith("went on from step")]
    left_out = [re.findall(r"leaves out batch (\d+)$", text) for text in starts]
    slow = [number for number, text in enumerate(texts) if "rank 1 computes its forward pass" in text]
    is_over = any("no rank is slower" in text for text in texts[slow[0] :])
    return left_out, len(slow), is_over, texts[-1].split(" ")[0].rstrip(";")


FAULTS = ([[], ["57"]], 1, True, "finished")  # a kill, a bad loss, a slow rank


def test_the_diary_that_comes_with_the_book_is_read_from_the_logs_beside_it() -> None:
    told = [{"step": event.step, "text": event.text} for event in diary.list_events(RESULTS / "rehearsal")]
    assert told == book.results("06_whats_next/results/rehearsal.json")["rows"]
    assert told_of_faults([event["text"] for event in told]) == FAULTS


@pytest.mark.thorough
def test_a_rehearsal_names_its_three_faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rehearsal, "FOLDER", tmp_path / "rehearsal")
    assert told_of_faults([event.text for event in rehearsal.main([])]) == FAULTS


def test_the_formula_is_within_five_percent_of_the_simulation() -> None:
    for row in plan_check.compare_interruptions(runs=50):
        assert row["predicted"] == pytest.approx(row["found"], rel=0.05), row


def test_the_rate_is_within_15_percent_of_chapters_2_and_4() -> None:
    rows = plan_check.compare_devices() + plan_check.compare_loaders()
    chapters = [row["chapter"][:2] for row in rows]
    assert (chapters.count("02"), chapters.count("04")) == (2, 7)
    for row in rows:
        assert row["predicted"] == pytest.approx(row["found"], rel=0.15), row


def test_a_replay_spends_the_compute_that_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rungs are a whole trial; a trial that is pruned at the first costs an eighth."""
    committed = book.results("06_whats_next/results/search.json")["rows"]
    table = search_check.make_table(committed)
    assert len(table) == 88
    rungs = []
    report = optuna.trial.Trial.report
    monkeypatch.setattr(optuna.trial.Trial, "report", lambda self, *v: (rungs.append(v[1]), report(self, *v)))
    for sampler, pruner in search_check.WAYS:
        rungs.clear()
        reached = search_check.replay(table, sampler, pruner, seed=1)
        assert len(rungs) in range(32 * 8, 33 * 8)
        assert reached == sorted(reached, reverse=True)
        assert rungs == list(range(1, 9)) * 32 if pruner == "none" else rungs.count(1) > 60
