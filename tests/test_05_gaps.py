"""Chapter 5: gaps that move, under --missing mask: loss and RMSE are plain sums over what is present."""

import re
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

import book
import numpy as np
import programs
import pytest
import runs
import xarray as xr
from made_up_winds import COLUMNS, SIZE, flags_for, make_datamodule, make_winds, with_moving_gaps, write

SCRIPT = "05_model_profiling/train.py"
VARIABLES = ("u", "v", "temperature")
UNITS = {"m/s": [0, 1], "K": [2]}
BATCH, STEPS, EVAL_SAMPLES = 4, 4, 12
MASK = ("--missing", "mask")
SMALL = (
    f"--accelerator cpu --max-steps {STEPS} --checkpoint-every 2 --log-every 1 --eval-samples {EVAL_SAMPLES}"
)

pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")


@pytest.fixture(scope="module", autouse=True)
def rooms() -> Iterator[None]:
    """The chapter's modules, under their own names while these tests run."""
    global evaluation, model
    forkserver.ensure_running()  # it imports what programs need while this process imports the same
    with book.rooms("05_model_profiling"):
        import evaluation
        import model

        yield


def flags(store: Path, *more: object) -> list[str]:
    return flags_for(store, *SMALL.split(), *more, variables=VARIABLES)


def train(store: Path, *more: object, **planted: float) -> programs.Run:
    return programs.run(SCRIPT, *flags(store, *more), draw_nothing=True, **planted)


def first_batch(data) -> list:
    """The patches of the first step."""
    patches = []
    for k in range(BATCH):
        read, number = data.order.address(0, k)
        samples = data.blocks.read_block(data.order.read(read))
        patches.append(samples[number].patch)
    return patches


def judged(data) -> list:
    """The patches that judge a run."""
    return [data.test.patch(0, k) for k in range(EVAL_SAMPLES)]


@pytest.fixture(scope="module")
def gappy() -> xr.Dataset:
    return with_moving_gaps(make_winds())


@pytest.fixture(scope="module")
def store(gappy: xr.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `gappy` is; the times of the first patches that are trained on and judged have no value at all."""
    folder = tmp_path_factory.mktemp("stores")
    data = make_datamodule(flags(write(folder / "gaps", gappy), *MASK))
    for maker, patch in ((data.blocks.maker, first_batch(data)[0]), (data.test.maker, judged(data)[0])):
        gappy.v[maker.period.positions[patch.time]] = np.nan
    return write(folder / "more_gaps", gappy)


@pytest.fixture(scope="module")
def run(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that masks what is missing."""
    output = tmp_path_factory.mktemp("masked")
    done = train(store, *MASK, "--output-dir", output)
    assert done.code == 0, done.err
    return output


def sum_squares(winds: xr.Dataset, maker, patches: list, guess: Callable) -> tuple[np.ndarray, float, int]:
    """Sums over unseen, present cells: of weighted squares of each variable, of weights, and how many."""
    total, weights, count = np.zeros(len(VARIABLES)), 0.0, 0
    for patch in patches:
        anomaly = cut_anomaly(winds, maker, patch)
        present = ~np.isnan(anomaly).any(axis=0)
        seen = present & patch.seen
        unseen = present & ~patch.seen
        inputs = np.concatenate([np.where(seen, anomaly, 0), seen[None]]).astype("float32")
        error = np.where(unseen, guess(inputs) - anomaly, 0)
        latitude = winds.latitude.values[patch.row : patch.row + SIZE, None]
        weight = np.cos(np.deg2rad(latitude)) * unseen
        total += (weight * error**2).sum(axis=(1, 2))
        weights += weight.sum()
        count += unseen.sum()
    return total, weights, count


def cut_anomaly(winds: xr.Dataset, maker, patch) -> np.ndarray:
    """Of a patch, over its standard deviation; NaN where a variable or its climatology is missing."""
    rows, columns = patch.row + np.arange(SIZE), (patch.column + np.arange(SIZE)) % COLUMNS
    at = np.ix_(range(len(VARIABLES)), rows, columns)
    values = np.stack([winds[name][maker.period.positions[patch.time]] for name in VARIABLES])
    mean = maker.mean[maker.period.months[patch.time]]
    return (values[at].astype("float64") - mean[at]) / maker.std


def answer_of(network) -> Callable:
    return lambda inputs: evaluation.predict(network, inputs)


def test_the_loss_is_that_of_a_plain_sum_over_present_unseen_cells(run: Path, store: Path, gappy) -> None:
    """Of the first step, whose weights are those of the seed."""
    data = make_datamodule(flags(store, *MASK))
    maker = data.blocks.maker
    network = model.FillGaps(maker.std.ravel().tolist(), UNITS, 6e-3, STEPS, 0).model
    total, _, count = sum_squares(gappy, maker, first_batch(data), answer_of(network))
    assert runs.losses(run)[0] == pytest.approx(total.sum() / len(VARIABLES) / count, rel=1e-5)


def test_the_rmse_is_that_of_a_plain_sum_over_present_unseen_cells(run: Path, store: Path, gappy) -> None:
    """Of the network as it was saved, and of the climatology."""
    data = make_datamodule(flags(store, *MASK))
    maker = data.test.maker
    trained = model.FillGaps.load_from_checkpoint(run / "last.ckpt", weights_only=True).eval()
    for name, guess in {"U-Net": answer_of(trained.model), "climatology": lambda inputs: 0}.items():
        total, weights, _ = sum_squares(gappy, maker, judged(data), guess)
        squares = maker.std.ravel() ** 2 * total / weights
        for unit, numbers in UNITS.items():
            expected = np.sqrt(squares[numbers].mean())
            assert runs.summary(run)["rmse"][name][unit] == pytest.approx(expected, rel=1e-5), (name, unit)


def test_the_summary_has_the_share_of_cells_with_a_climatology(run: Path, gappy: xr.Dataset) -> None:
    """They need three values in the month of the training years."""
    present = gappy[list(VARIABLES)].to_dataarray().notnull().all("variable").sel(time=slice("1982", "1983"))
    counted = (present.groupby("time.month").sum() >= 3).values
    shares = counted[:, counted.any(axis=0)].mean(axis=1)
    found = runs.summary(run)["climatology_shares"].values()
    np.testing.assert_allclose(list(found), shares)
    assert shares.min() < 1


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_stopped_with_a_worker_and_resumed_with_two_it_ends_at_the_same_bits(
    method: str, run: Path, store: Path, tmp_path: Path
) -> None:
    """As without workers."""
    started = ("--start-method", method, "--num-workers")
    killed = train(store, *MASK, "--output-dir", tmp_path, *started, 1, kill_at_step=3)
    assert killed.code < 0, killed.err
    assert runs.state(tmp_path)["step"] == 2
    resumed = train(store, *MASK, "--output-dir", tmp_path, *started, 2, "--resume")
    assert resumed.code == 0, resumed.err
    runs.assert_same_bits(tmp_path, run)
    runs.assert_resumed(tmp_path, 2, run)


def assert_refused(done: programs.Run, pattern: str) -> None:
    assert done.code == 2, done.err
    assert re.search(pattern, done.err.splitlines()[-1]), done.err


def test_gaps_are_refused_without_the_flag_and_test_times_without_a_value(
    store: Path, gappy: xr.Dataset, tmp_path: Path
) -> None:
    """In a line: variable, date, both causes and the remedy."""
    said = r"error: --store \S+: (u|v) on 198\d-\S+: NaN: a value or a chunk is missing; if the data have gaps, give --missing mask"
    assert_refused(train(store, "--output-dir", tmp_path), said)
    empty = write(tmp_path / "empty", gappy.where(gappy.time.dt.year < 1985))
    said = "--test-times: no value is present in any patch"
    assert_refused(train(empty, *MASK, "--output-dir", tmp_path), said)


def test_the_picture_is_of_the_first_patch_with_values_and_leaves_absent_cells_blank(
    store: Path, gappy: xr.Dataset
) -> None:
    """In all panels; climatology would be drawn as truth."""
    data = make_datamodule(flags(store, *MASK))
    figure = evaluation.plot_example(data.test, UNITS, model.UNet(len(VARIABLES)))
    anomalies = [cut_anomaly(gappy, data.test.maker, patch) for patch in judged(data)[:2]]
    empty, absent = (np.isnan(anomaly).any(axis=0) for anomaly in anomalies)
    assert empty.all()
    assert absent.any()
    shown = {axes.get_title(): axes.collections[0].get_array() for axes in figure.axes if axes.get_title()}
    assert len(shown) == 4
    for values in shown.values():
        assert np.ma.getmaskarray(values)[absent].all()
    for name in ("truth", "filled by the network"):
        assert not np.ma.getmaskarray(shown[name])[~absent].any()
