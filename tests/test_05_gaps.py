"""Chapter 5: data of other people: gaps that move, sparse stores, regions, calendars, levels."""

import os
import pickle
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import book
import numpy as np
import pytest
import runs
import torch
import xarray as xr
from matplotlib.figure import Figure

# Every 10 days of four years, 9 degrees, a chunk for every time. The first two years are to train on.
ROWS, COLUMNS, SIZE, BATCH, STEPS = 20, 40, 16, 4, 4
SPANS = "--train-times 1982 1983 --validation-times 1984 1984 --test-times 1985 1985".split()
LAND = (slice(None), slice(5, 9), slice(10, 18))
MAP = (1, ROWS, COLUMNS)
EVAL_SAMPLES = 12

pytestmark = [
    pytest.mark.filterwarnings("ignore:Failed to open Zarr store with consolidated metadata"),
    pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part"),
    pytest.mark.filterwarnings("ignore:The data type .* does not have a Zarr V3 specification"),
]


@pytest.fixture(scope="module", autouse=True)
def rooms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The chapter's modules, under their own names while these tests run; few patches judge a run."""
    global errors, evaluation, fields, model, options, plot_example, store, store_climatology, task, train
    with book.rooms("05_model_profiling"), pytest.MonkeyPatch.context() as patch:
        import errors
        import evaluation
        import fields
        import model
        import options
        import store
        import store_climatology
        import task
        import train

        patch.setattr(options, "OUTPUTS", tmp_path_factory.mktemp("outputs"))
        plot_example = evaluation.plot_example
        patch.setattr(evaluation, "plot_example", lambda *_: Figure())  # drawing takes longer than training
        yield


# ------------------------------------------------------------------------------ stores and runs


def make_winds(steps: int = 144) -> xr.Dataset:
    """u and v without a gap."""
    rng = np.random.default_rng(0)
    time = xr.date_range("1982-01-01", periods=steps, freq="10D")
    latitude = np.linspace(-85.5, 85.5, ROWS)
    coords = {"time": time, "latitude": latitude, "longitude": 9.0 * np.arange(COLUMNS)}
    season = 5 * np.cos(2 * np.pi * time.day_of_year.values / 365)[:, None, None]
    values = rng.normal(season * np.cos(np.deg2rad(latitude))[:, None], 2, (2, steps, ROWS, COLUMNS))
    winds = {name: (tuple(coords), each.astype("float32")) for name, each in zip("uv", values)}
    return xr.Dataset(winds, coords)


def moving_gaps(winds: xr.Dataset) -> xr.Dataset:
    """Land in u, and two clouds that drift to the east: together a tenth of all values, other ones in v."""
    row, column = np.mgrid[:ROWS, :COLUMNS]
    gappy = winds.copy(deep=True)
    for number, name in enumerate("uv"):
        for time in range(winds.time.size):
            for cloud in (0, 1):
                middle = (3 * time + 20 * cloud + number) % COLUMNS
                east = (column - middle + COLUMNS // 2) % COLUMNS - COLUMNS // 2
                north = row - 6 - 8 * cloud
                gappy[name].values[time, east**2 + north**2 < 12] = np.nan
    gappy.u[LAND] = np.nan
    return gappy


def write(path: Path, winds: xr.Dataset, chunks: tuple[int, ...] = MAP, **encoding: object) -> Path:
    each = {"chunks": chunks} | encoding
    winds.to_zarr(path, encoding={name: each for name in winds.data_vars})
    return path


@pytest.fixture(scope="module")
def winds() -> xr.Dataset:
    return make_winds()


@pytest.fixture(scope="module")
def gappy(winds: xr.Dataset) -> xr.Dataset:
    return moving_gaps(winds)


@pytest.fixture(scope="module")
def folder(winds: xr.Dataset, gappy: xr.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of stores: `whole` has no gap, and `gappy` has moving ones."""
    folder = tmp_path_factory.mktemp("stores")
    write(folder / "whole", winds)
    write(folder / "gappy", gappy)
    return folder


def flags_for(path: Path, *flags: object) -> list[str]:
    sizes = [
        "--patch-size",
        SIZE,
        "--batch-size",
        BATCH,
        "--max-steps",
        STEPS,
        "--checkpoint-every",
        2,
        "--log-every",
        1,
        "--eval-samples",
        EVAL_SAMPLES,
    ]
    return list(map(str, ["--store", path, "--variables", "u", "v", *SPANS, *sizes, *flags]))


def run(path: Path, output: Path, *flags: object) -> dict:
    """What a reader's command does, in this process."""
    return train.main(flags_for(path, "--output-dir", output, *flags))


def make_data(path: Path, *flags: object):
    parsed = options.parse_options("", flags_for(path, *flags))
    location = store.Location(str(path), missing_chunks=parsed.missing_chunks)
    return task.make_datamodule(parsed, task.make_data(parsed, location), 0)


@pytest.fixture
def refused(tmp_path: Path, capfd: pytest.CaptureFixture) -> Callable:
    """Call train.py's main with flags that it refuses, and return what its last line says."""

    def call(path: Path, *flags: object) -> str:
        with pytest.raises(SystemExit) as ended:
            run(path, tmp_path / "refused", *flags)
        assert ended.value.code == 2
        return capfd.readouterr().err.splitlines()[-1].partition(": error: ")[2]

    return call


# ------------------------------------------------------------------------------ gaps that move


class ByHand:
    """Patches, climatology, loss and RMSE of a dataset, by plain numpy on its arrays."""

    def __init__(self, winds: xr.Dataset):
        self.values = np.stack([winds.u.values, winds.v.values], axis=1).astype("float64")
        self.values[np.isnan(self.values).any(axis=1)[:, None].repeat(2, axis=1)] = np.nan
        self.months = winds.time.dt.month.values - 1
        years = winds.time.dt.year.values
        training = years <= 1983
        self.mean = np.full((12, 2, ROWS, COLUMNS), np.nan)
        anomalies = []
        for month in range(12):
            chosen = self.values[training & (self.months == month)]
            enough = (~np.isnan(chosen[:, 0])).sum(axis=0) >= 3
            self.mean[month, :, enough] = np.nanmean(chosen[..., enough], axis=0).T
            anomalies.append(chosen - self.mean[month])
        self.std = np.nanstd(np.concatenate(anomalies), axis=(0, 2, 3))
        self.rows = np.deg2rad(winds.latitude.values)

    def cut(self, maker, patch) -> tuple[np.ndarray, ...]:
        """Of a patch: normalised anomalies, NaN where absent; mean; unseen cells; cos(latitude)."""
        time = maker.period.positions[patch.time]
        rows = np.arange(patch.row, patch.row + SIZE)
        columns = np.arange(patch.column, patch.column + SIZE) % COLUMNS
        at = np.ix_([0, 1], rows, columns)
        mean = self.mean[self.months[time]][at]
        anomaly = (self.values[time][at] - mean) / self.std[:, None, None]
        present = ~np.isnan(anomaly[0])
        return anomaly, mean, present & ~patch.seen, present & patch.seen, np.cos(self.rows[rows])[:, None]

    def squares(self, network, maker, patches: list) -> tuple[np.ndarray, float, float]:
        """Sums over unseen, present cells: of weighted squares of each variable, of weights, and how many."""
        total, weights, count = np.zeros(2), 0.0, 0
        for patch in patches:
            anomaly, _, unseen, seen, weight = self.cut(maker, patch)
            inputs = np.concatenate([np.where(seen, anomaly, 0), seen[None]]).astype("float32")
            with torch.no_grad():
                answer = network(torch.from_numpy(inputs)[None])[0].double().numpy()
            error = np.where(unseen, answer - np.nan_to_num(anomaly), 0)
            total += (weight * error**2).sum(axis=(1, 2))
            weights += (weight * unseen).sum()
            count += unseen.sum()
        return total, weights, count


@pytest.fixture(scope="module")
def masked_run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """The folder of a run on `gappy`, and its metrics."""
    output = tmp_path_factory.mktemp("masked")
    return output, run(folder / "gappy", output, "--missing", "mask")


def test_a_tenth_is_missing(gappy: xr.Dataset) -> None:
    missing = gappy.isnull().to_dataarray().values
    assert 0.08 < missing.mean() < 0.12
    ever = missing.any(axis=1) & ~missing.all(axis=1)
    assert ever.mean() > 0.5  # cells that are there at one time and not at another


def test_the_loss_is_that_of_a_plain_sum_over_present_unseen_cells(
    masked_run: tuple, folder: Path, gappy: xr.Dataset
) -> None:
    """Of the first step, whose weights are those of the seed."""
    by_hand = ByHand(gappy)
    data = make_data(folder / "gappy", "--missing", "mask")
    patches = []
    for k in range(BATCH):
        read, number = data.order.address(0, k)
        samples = data.blocks.read_block(data.order.block(read), data.order.rng(read))
        patches.append(samples[number].patch)
    np.testing.assert_allclose(data.test.maker.std.ravel(), by_hand.std, rtol=1e-6)
    network = model.FillGaps(data.test.maker.std.ravel().tolist(), {"m/s": [0, 1]}, 6e-3, STEPS, 0).model
    total, _, count = by_hand.squares(network, data.blocks.maker, patches)
    assert runs.losses(masked_run[0])[0] == pytest.approx(total.sum() / 2 / count, rel=1e-5)


def test_the_rmse_is_that_of_a_plain_sum_over_present_unseen_cells(
    masked_run: tuple, folder: Path, gappy: xr.Dataset
) -> None:
    """Of the network as it was saved, and of the climatology."""
    output, metrics = masked_run
    by_hand, data = ByHand(gappy), make_data(folder / "gappy", "--missing", "mask")
    patches = [data.test.patch(0, k) for k in range(EVAL_SAMPLES)]
    trained = model.FillGaps.load_from_checkpoint(output / "last.ckpt", weights_only=True).eval().cpu()
    total, weights, _ = by_hand.squares(trained.model, data.test.maker, patches)
    expected = by_hand.std * np.sqrt(total / weights)
    found = [metrics["rmse"]["U-Net"][name] for name in "uv"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)

    squares = np.zeros(2)
    for patch in patches:
        anomaly, _, unseen, _, weight = by_hand.cut(data.test.maker, patch)
        squares += (weight * np.where(unseen, anomaly, 0) ** 2).sum(axis=(1, 2))
    expected = by_hand.std * np.sqrt(squares / weights)
    found = [metrics["rmse"]["climatology"][name] for name in "uv"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_without_the_flag_gaps_are_refused(folder: Path, refused: Callable) -> None:
    """Variable, date, both causes and the remedy."""
    said = refused(folder / "gappy")
    assert (
        r"--store" in said
        and ": a value or a chunk is missing; give --missing mask" in said
        and any(f"{name} on 198" in said for name in "uv")
    ), said


def test_stopped_with_workers_and_resumed_without_it_ends_at_the_same_bits(
    masked_run: tuple, folder: Path, tmp_path: Path, monkeypatch
) -> None:
    step = model.FillGaps.on_before_optimizer_step

    def stop(module, optimizer) -> None:
        if module.trainer.global_step == 3:
            raise InterruptedError
        step(module, optimizer)

    with monkeypatch.context() as patch:
        patch.setattr(model.FillGaps, "on_before_optimizer_step", stop)
        with pytest.raises(InterruptedError):
            run(folder / "gappy", tmp_path, "--missing", "mask", "--num-workers", 1)
    assert runs.state(tmp_path)["step"] == 2
    run(folder / "gappy", tmp_path, "--missing", "mask", "--resume")
    runs.assert_same_bits(tmp_path, masked_run[0])
    runs.assert_resumed(tmp_path, 2, masked_run[0])


def test_a_run_does_not_go_on_with_another_meaning_of_missing(
    masked_run: tuple, folder: Path, refused: Callable
) -> None:
    assert "has --missing mask, not refuse" in refused(
        folder / "whole", "--resume", masked_run[0] / "last.ckpt"
    )


def test_the_block_loader_brings_the_same_samples_as_single_reads(folder: Path) -> None:
    data = make_data(folder / "gappy", "--missing", "mask")
    samples = data.blocks.read_block(7, np.random.default_rng(0))
    one = data.blocks.make_batch(samples)
    maker = data.blocks.maker
    values = data.data.reader.read_at_once([maker.region(sample.patch) for sample in samples])
    other = maker.make_batch([sample._replace(values=each) for sample, each in zip(samples, values)])
    for name in other:
        np.testing.assert_array_equal(one[name], other[name])
    assert not np.isnan(one["target"]).any()
    absent = one["input"][:, -1:] + one["unseen"] == 0
    assert 0 < absent.mean() < 0.5


def test_without_a_gap_the_flag_changes_nothing_but_the_times_of_the_climatology(folder: Path) -> None:
    """Which are all, and not a sample; there are fewer than a sample has."""
    plain, masked = (make_data(folder / "whole", "--missing", how).test for how in ("refuse", "mask"))
    one, other = plain.__getitems__([(0, 0), (0, 1)]), masked.__getitems__([(0, 0), (0, 1)])
    for first, second in zip(one, other):
        for name in first:
            np.testing.assert_allclose(first[name], second[name], rtol=1e-4, atol=1e-5)


def test_a_time_without_a_value_draws_no_loss(folder: Path, gappy: xr.Dataset, tmp_path: Path) -> None:
    """Nor does it change the picture: that of the first patch in which something is."""
    empty = gappy.copy(deep=True)
    data = make_data(folder / "gappy", "--missing", "mask")
    first = data.test.maker.period.positions[data.test.patch(0, 0).time]
    empty.u[first] = np.nan
    data = make_data(write(tmp_path / "empty", empty), "--missing", "mask")
    sample, other = data.test.__getitems__([(0, 0), (0, 1)])
    for name in ("input", "target", "unseen", "weight"):
        assert not sample[name].any()
        assert other[name].any()
    number, shown = evaluation.first_with_target(data.test)
    assert number == 1
    np.testing.assert_array_equal(shown["target"], other["target"])


def test_test_times_without_a_value_are_refused(gappy: xr.Dataset, refused: Callable, tmp_path: Path) -> None:
    empty = gappy.where(gappy.time.dt.year < 1985)
    said = refused(write(tmp_path / "empty", empty), "--missing", "mask")
    assert "--test-times: no value is present in any patch" in said


def test_the_picture_leaves_absent_cells_blank(folder: Path, gappy: xr.Dataset) -> None:
    """In all panels; climatology would be drawn as truth."""
    data = make_data(folder / "gappy", "--missing", "mask")
    network = model.UNet(2)
    figure = plot_example(data.test, {"m/s": [0, 1]}, network)
    patch = data.test.patch(0, 0)
    anomaly, *_ = ByHand(gappy).cut(data.test.maker, patch)
    absent = np.isnan(anomaly[0])
    assert absent.any()
    shown = {axes.get_title(): axes.collections[0].get_array() for axes in figure.axes if axes.get_title()}
    assert len(shown) == 4
    for values in shown.values():
        assert np.ma.getmaskarray(values)[absent].all()
    for name in ("truth", "filled by the network"):
        assert not np.ma.getmaskarray(shown[name])[~absent].any()


# ------------------------------------------------------------------------------ the climatology


def make_ships() -> xr.Dataset:
    """Months of 30 years as ships see them: no land, no ice in winter, and few values in the south."""
    rng = np.random.default_rng(1)
    time = xr.date_range("1960-01-01", periods=360, freq="MS")
    coords = {"time": time, "latitude": np.linspace(-80, 80, 18), "longitude": 10.0 * np.arange(36)}
    values = rng.normal(10, 3, (2, 360, 18, 36)).astype("float32")
    for n, month in enumerate(time.month):
        north = 14 + abs(month - 7) // 3  # rows from here on are under ice in winter only
        if month in (11, 12, 1, 2, 3):
            values[:, n, min(north, 16) :] = np.nan
        south = rng.random((4, 36)) < 0.95
        values[:, n, :4][:, south] = np.nan
    values[:, :, 6:9, 3:9] = np.nan
    return xr.Dataset({name: (tuple(coords), each) for name, each in zip("uv", values)}, coords)


@pytest.fixture(scope="module")
def ships() -> xr.Dataset:
    return make_ships()


TRAINING = ("1960", "1984")  # more times of a month than a sample has


def climatology_of(path: Path, names: tuple[str, ...] = ("u", "v"), kept: Path | None = None):
    """Of what is present at all training times."""
    reader = store.FieldReader(store.Location(str(path)), list(names))
    (training,) = fields.split_times(reader.open().time, {"--train-times": TRAINING})
    folder = options.OUTPUTS / "climatology"
    return store_climatology.load_climatology(reader, training, span=TRAINING, missing="mask", folder=folder)


def test_the_climatology_is_numpys_nanmean_by_month(ships: xr.Dataset, tmp_path: Path) -> None:
    """Of cells with three values or more; cells with ice have one in summer only."""
    found = climatology_of(write(tmp_path / "ships", ships, (7, 18, 36)))
    values = np.stack([ships.u.values, ships.v.values])[:, :300].astype("float64")
    squares, count, few = np.zeros(2), 0, 0
    for month in range(12):
        of_month = values[:, month::12]
        present = (~np.isnan(of_month[0])).sum(axis=0)
        expected = np.full((2, 18, 36), np.nan)
        expected[:, present >= 3] = np.nanmean(of_month[..., present >= 3], axis=1)
        np.testing.assert_allclose(found.mean[month], expected, rtol=1e-6)
        anomalies = (of_month - expected[:, None])[..., present >= 3]
        squares += np.nansum(anomalies**2, axis=(1, 2))
        count += present[present >= 3].sum()
        few += ((present > 0) & (present < 3)).sum()
    np.testing.assert_allclose(found.std, np.sqrt(squares / count), rtol=1e-6)
    assert few > 100
    icy = np.isnan(found.mean[:, 0, 17, 0])
    assert 0 < icy.sum() < 12
    assert not found.valid[6:9, 3:9].any()
    assert found.valid[10:].all()


def test_a_cell_is_present_only_if_all_variables_are(ships: xr.Dataset, tmp_path: Path) -> None:
    """In u, v has gaps of its own: neither counts there."""
    holes = ships.copy(deep=True)
    holes.v[5::36, 12] = np.nan  # a June of three
    found = climatology_of(write(tmp_path / "holes", holes, (12, 18, 36)))
    junes = holes.u.values[5:300:12, 12]
    without = np.delete(junes, np.s_[::3], axis=0).astype("float64")
    np.testing.assert_allclose(found.mean[5, 0, 12], without.mean(axis=0), rtol=1e-6)


def test_a_pass_that_was_stopped_goes_on_where_it_was(ships: xr.Dataset, tmp_path: Path, monkeypatch) -> None:
    """And ends at the same bits; what is in the saved sums is not read again."""
    path = write(tmp_path / "ships", ships, (6, 18, 36))
    monkeypatch.setattr(options, "OUTPUTS", tmp_path / "whole")
    whole = climatology_of(path)
    monkeypatch.setattr(options, "OUTPUTS", tmp_path / "stopped")
    read, starts = store.FieldReader.read_at_once, []

    def watched(reader, regions: list[dict]) -> np.ndarray:
        starts.append(regions[0]["time"].start)
        if len(starts) == 31 and "stopped" not in starts:
            starts.append("stopped")
            raise errors.DataError("stopped")
        return read(reader, regions)

    monkeypatch.setattr(store.FieldReader, "read_at_once", watched)
    with pytest.raises(errors.DataError, match="stopped"):
        climatology_of(path)
    (saved,) = (tmp_path / "stopped/climatology").glob("*.sums.npz")
    before = len(starts)
    again = climatology_of(path)
    np.testing.assert_array_equal(again.mean, whole.mean)
    np.testing.assert_array_equal(again.std, whole.std)
    assert len(starts) - before < 25  # of 50 blocks
    assert not saved.exists()
    count = len(starts)
    climatology_of(path)  # from the file
    assert len(starts) == count


def test_under_mask_a_stores_statistics_are_not_taken(ships: xr.Dataset, tmp_path: Path, monkeypatch) -> None:
    """They do not say how many values they are of."""
    monkeypatch.setattr(store_climatology, "read_statistics", lambda *_: pytest.fail("taken"))
    climatology_of(write(tmp_path / "ships", ships, (60, 18, 36)))


def test_a_reader_keeps_its_level_on_the_way_to_a_worker(winds: xr.Dataset, tmp_path: Path) -> None:
    stored = levels([500, 850])(winds.isel(time=slice(3)))
    reader = store.FieldReader(
        store.Location(str(write(tmp_path / "store", stored, (1, 1, ROWS, COLUMNS)))), ["u"], "500"
    )
    sent = pickle.loads(pickle.dumps(reader))
    np.testing.assert_array_equal(sent.read("u", {"time": 1}), winds.u[1] / 2)


def test_a_store_with_other_chunks_has_a_climatology_of_its_own(ships: xr.Dataset, tmp_path: Path) -> None:
    """A pass that was stopped has counted chunks; it must not go on in others."""
    path = write(tmp_path / "ships", ships, (6, 18, 36))
    (training,) = fields.split_times(ships.time, {"--train-times": TRAINING})
    before = store_climatology.identify(store.FieldReader(store.Location(str(path)), ["u", "v"]), training)
    shutil.rmtree(path)
    write(path, ships, (8, 18, 36))
    after = store_climatology.identify(store.FieldReader(store.Location(str(path)), ["u", "v"]), training)
    assert before != after


def test_blocks_are_read_at_the_same_time_and_each_once(
    ships: xr.Dataset, tmp_path: Path, monkeypatch
) -> None:
    path = write(tmp_path / "ships", ships, (6, 18, 36))
    monkeypatch.setattr(options, "OUTPUTS", tmp_path / "kept")
    barrier, read, starts = threading.Barrier(2), store.FieldReader.read_at_once, []

    def together(reader, regions: list[dict]) -> np.ndarray:
        barrier.wait(timeout=60)  # for another read; BrokenBarrierError if there is none
        starts.append(regions[0]["time"].start)
        return read(reader, regions)

    monkeypatch.setattr(store.FieldReader, "read_at_once", together)
    climatology_of(path)
    assert sorted(starts) == list(range(0, 300, 6))


# ------------------------------------------------------------------------------ missing chunks


def test_a_sparse_store_trains_with_the_flag_and_is_refused_without(
    winds: xr.Dataset, refused: Callable, tmp_path: Path
) -> None:
    """Days of nothing but 0, whose chunks are not written: as if they were."""
    dry = winds.copy(deep=True)
    dry.v[::5] = 0
    sparse = write(tmp_path / "sparse", dry, _FillValue=None, fill_value=0.0)
    assert not (sparse / "v/c/5").exists()
    dense = write(tmp_path / "dense", dry)
    said = refused(sparse)
    assert "this chunk is missing" in said and "give --missing-chunks fill" in said
    metrics = run(sparse, tmp_path / "one", "--missing-chunks", "fill")
    assert run(dense, tmp_path / "other")["rmse"] == metrics["rmse"]
    torch.testing.assert_close(
        runs.weights(tmp_path / "one"), runs.weights(tmp_path / "other"), rtol=0, atol=0
    )
    assert metrics["missing_chunks"] > 0


def test_packed_zeros_are_not_written_and_are_read_with_the_flag(
    winds: xr.Dataset, refused: Callable, tmp_path: Path
) -> None:
    """xarray's own encoding of int16: its chunks of 0 are left out, whatever stands for a missing value."""
    dry = winds.copy(deep=True)
    dry.v[::5] = 0
    packed = write(tmp_path / "packed", dry, dtype="int16", scale_factor=0.001, _FillValue=-32768)
    assert not (packed / "v/c/5").exists()
    assert "give --missing-chunks fill" in refused(packed)
    data = make_data(packed, "--missing-chunks", "fill")
    np.testing.assert_array_equal(data.data.reader.read("v", {"time": 5}), 0)


def test_a_chunk_that_goes_missing_is_counted_and_printed(
    folder: Path, refused: Callable, tmp_path: Path, capfd
) -> None:
    """Each that was asked for once: an epoch reads all training times."""
    path = shutil.copytree(folder / "gappy", tmp_path / "store")
    data = make_data(path, "--missing", "mask")
    judged = [
        int(test.maker.period.positions[test.patch(0, 0).time]) for test in (data.validation, data.test)
    ]
    lost = [0, 40, 70, *judged]  # the first three are to train on
    for time in lost:
        shutil.rmtree(path / f"u/c/{time}")
    shutil.rmtree(options.OUTPUTS / "climatology")  # that of the store when it was whole
    more = ("--missing", "mask", "--max-steps", 18, "--validate-every", 18, "--patches-per-block", 1)
    metrics = run(path, tmp_path / "run", *more)
    printed = capfd.readouterr().out
    assert "missing chunks in the training times: 3" in printed
    assert metrics["missing_chunks"] == len(lost)
    assert "missing chunks that were asked for: 5" in printed
    again = run(path, tmp_path / "again", *more)  # with the climatology that is kept
    assert again["missing_chunks"] == len(lost)
    assert "a value or a chunk is missing" in refused(path)


@pytest.mark.parametrize(
    ("encoding", "missing_chunks", "rule"),
    [
        ({"_FillValue": np.nan, "fill_value": np.nan}, "refuse", None),
        ({"_FillValue": np.float32(np.nan)}, "refuse", None),
        ({"fill_value": np.nan}, "refuse", None),
        ({"missing_value": -99, "fill_value": -99}, "refuse", None),
        ({"_FillValue": -99, "fill_value": np.nan}, "fill", "copy"),
        ({"_FillValue": np.nan, "fill_value": 0.0}, "refuse", "if chunks"),
        ({"_FillValue": -32768, "fill_value": 0}, "fill", None),
        ({"fill_value": 0}, "refuse", "if chunks"),
        ({"fill_value": 0}, "fill", None),
        ({}, "refuse", "if chunks"),
        ({}, "fill", None),
    ],
)
def test_what_a_missing_chunk_means(encoding: dict, missing_chunks: str, rule: str | None) -> None:
    found = store.explain_missing(encoding, missing_chunks)
    assert found is rule is None or found.startswith(rule)


# ------------------------------------------------------------------------------ calendars, levels, packing


def calendar(name: str) -> Callable:
    """The same fields on dates of another calendar."""

    def change(winds: xr.Dataset) -> xr.Dataset:
        start, n = "1982-01-01", winds.time.size
        dates = xr.date_range(start, periods=n, freq="10D", calendar=name, use_cftime=True)
        return winds.assign_coords(time=dates)

    return change


def numbered(**attrs: str) -> Callable:
    """Times that are numbers."""

    def change(winds: xr.Dataset) -> xr.Dataset:
        winds = winds.assign_coords(time=np.arange(winds.time.size))
        winds.time.attrs = attrs
        return winds

    return change


def levels(values: list, name: str = "level") -> Callable:
    """The winds at the last of several values of a further dimension; half of them at the others."""
    return lambda winds: xr.concat(
        [winds / 2] * (len(values) - 1) + [winds], xr.Variable(name, values)
    ).transpose("time", ...)


def shuffled(winds: xr.Dataset) -> xr.Dataset:
    return winds.isel(time=np.random.default_rng(0).permutation(winds.time.size))


def repeated(winds: xr.Dataset) -> xr.Dataset:
    return xr.concat([winds, winds.isel(time=[3])], "time")


SAME = "trains, to the same weights"
CASES = {  # what becomes of the dataset, flags, and what is said, or that it trains
    "360-day calendar": (calendar("360_day"), [], "trains"),
    "no-leap calendar": (calendar("noleap"), [], "trains"),
    "integer times": (numbered(), [], "time holds int64, not dates; give it units such as"),
    "months": (
        numbered(units="months since 1982-01-01"),
        [],
        "mend its attributes, such as the units of time",
    ),
    "a level of length one": (levels([500]), [], SAME),
    "levels": (levels([500, 850]), [], "choose a value of the further dimension by --level"),
    "a chosen level": (levels([500, 850]), ["--level", 850], SAME),
    "a level in single precision": (levels(np.float32([0.5, 0.494025])), ["--level", 0.494025], SAME),
    "a chosen member": (levels(["r1", "r2"], "member"), ["--level", "r2"], SAME),
    "no such level": (levels([500, 850]), ["--level", 700], "level has no such value; give one of 500, 850"),
    "no level": (lambda winds: winds, ["--level", 700], "the variables have no further dimension"),
    "unsorted times": (shuffled, [], SAME),
    "repeated times": (repeated, [], "time has a value twice"),
}


@pytest.fixture(scope="module")
def plain_weights(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    output = tmp_path_factory.mktemp("plain")
    run(folder / "whole", output, "--max-steps", 2)
    return runs.weights(output)


@pytest.mark.parametrize("case", CASES)
def test_strange_times_and_dimensions_train_or_are_refused_in_a_line(
    case: str, winds: xr.Dataset, plain_weights: dict, refused: Callable, tmp_path: Path
) -> None:
    change, flags, expected = CASES[case]
    strange = change(winds)
    sizes = strange.u.sizes
    chunks = tuple(sizes[dim] if dim in ("latitude", "longitude") else 1 for dim in sizes)
    write(tmp_path / "store", strange, chunks)
    if not expected.startswith("trains"):
        assert expected in refused(tmp_path / "store", *flags)
        return
    metrics = run(tmp_path / "store", tmp_path / "run", "--max-steps", 2, *flags)
    assert np.isfinite(list(metrics["rmse"]["U-Net"].values())).all()
    if expected == SAME:
        torch.testing.assert_close(runs.weights(tmp_path / "run"), plain_weights, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["360_day", "noleap"])
def test_dates_of_another_calendar_have_its_months(name: str, winds: xr.Dataset) -> None:
    """A 360-day year has a 30th of February, which no other has."""
    time = calendar(name)(winds).time
    training, test = fields.split_times(
        time, {"--train-times": ("1982", "1983"), "--test-times": ("1985", "1985")}
    )
    assert [date.year for date in training.dates[[0, -1]]] == [1982, 1983]
    assert [date.month - 1 for date in test.dates] == test.months.tolist()
    assert len(training.dates) == 72 + (name == "noleap")


def test_a_climatology_of_another_calendar_is_kept(winds: xr.Dataset, tmp_path: Path, monkeypatch) -> None:
    """Dates are objects there: what identifies the store is what they say, not where they are in memory."""
    monkeypatch.setattr(options, "OUTPUTS", tmp_path / "kept")
    path = write(tmp_path / "store", calendar("360_day")(winds))
    make_data(path)
    make_data(path)
    assert len(list((tmp_path / "kept/climatology").glob("*.npz"))) == 1


def test_packed_integers_are_unpacked(
    gappy: xr.Dataset, folder: Path, masked_run: tuple, tmp_path: Path
) -> None:
    """With scale, offset and a number for what is missing."""
    packing = {"dtype": "int16", "scale_factor": 0.001, "add_offset": 1.0, "_FillValue": -32768}
    path = write(tmp_path / "packed", gappy, **packing, fill_value=-32768)
    metrics = run(path, tmp_path / "run", "--missing", "mask")
    assert metrics["rmse"]["climatology"] == pytest.approx(masked_run[1]["rmse"]["climatology"], rel=1e-3)
    assert metrics["rmse"]["U-Net"] == pytest.approx(masked_run[1]["rmse"]["U-Net"], rel=0.02)


# ------------------------------------------------------------------------------ regions and servers


class Handler(SimpleHTTPRequestHandler):
    """A web server without ETags that breaks off some bodies, and a proxy that goes nowhere."""

    def __init__(self, asked: list, cuts: Counter, *args: object, **how: object):
        self.asked, self.cuts = asked, cuts
        super().__init__(*args, **how)

    def log_message(self, *about: object) -> None:
        pass

    def do_CONNECT(self) -> None:
        self.asked.append(self.path)
        self.send_error(502)

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path.startswith("/elsewhere"):
            self.send_response(301)  # as S3 does for a bucket of another region
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if self.cuts[self.path] > 0:
            self.cuts[self.path] -= 1
            content = Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        super().do_GET()


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[str, list, Counter]]:
    """Its address, what it was asked for, and how often each path is to be broken off."""
    asked, cuts = [], Counter()
    handler = partial(Handler, asked, cuts, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", asked, cuts
        http.shutdown()
        thread.join()


def test_a_body_that_breaks_off_is_asked_for_again(server: tuple, winds: xr.Dataset) -> None:
    """Of a chunk, and of the metadata while the store is opened."""
    address, asked, cuts = server
    cuts |= Counter({"/whole/zarr.json": 1, "/whole/u/c/3/0/0": 2})
    reader = store.FieldReader(store.Location(f"{address}/whole"), ["u", "v"])
    np.testing.assert_array_equal(reader.read("u", {"time": 3}), winds.u[3])
    assert asked.count("/whole/zarr.json") == 2
    assert asked.count("/whole/u/c/3/0/0") == 3


def test_a_body_that_always_breaks_off_ends_with_the_retries(server: tuple) -> None:
    address, asked, cuts = server
    cuts |= Counter({"/whole/u/c/3/0/0": 10**6})
    reader = store.FieldReader(store.Location(f"{address}/whole", retry_timeout=1), ["u", "v"])
    with pytest.raises(errors.DataError, match=r"u of 1982-01-31T00:00: u/c/3/0/0: .*body error"):
        reader.read("u", {"time": 3})
    assert asked.count("/whole/u/c/3/0/0") > 1


@pytest.fixture
def proxied(server: tuple, monkeypatch: pytest.MonkeyPatch) -> list:
    """Where this process would connect to, if it were not sent to a proxy that goes nowhere."""
    address, asked, _ = server
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HTTPS_PROXY", address)
    return asked


@pytest.mark.parametrize(
    ("url", "environment", "region", "host"),
    [
        ("s3://bucket/x", {}, "eu-west-1", "s3.eu-west-1.amazonaws.com:443"),
        ("s3://bucket/x", {"AWS_REGION": "ap-south-1"}, None, "s3.ap-south-1.amazonaws.com:443"),
        ("s3://bucket/x", {"AWS_REGION": "ap-south-1"}, "eu-west-1", "s3.eu-west-1.amazonaws.com:443"),
        ("gs://bucket/x", {}, None, "storage.googleapis.com:443"),
        ("az://box/x", {"AZURE_STORAGE_ACCOUNT_NAME": "sea"}, None, "sea.blob.core.windows.net:443"),
    ],
)
def test_a_bucket_is_looked_for_in_its_region(
    url: str, environment: dict, region: str | None, host: str, proxied: list, monkeypatch
) -> None:
    """Read anonymously: the region decides which host is asked."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    location = store.Location(url, anonymous=True, retry_timeout=0.2, region=region)
    with pytest.raises(errors.DataError):
        store.FieldReader(location, ["u"]).open()
    assert set(proxied) == {host}


def test_a_bucket_of_another_region_is_refused_with_the_flag(server: tuple) -> None:
    location = store.Location("s3://elsewhere/x", endpoint=server[0], anonymous=True)
    with pytest.raises(errors.DataError, match="the bucket is in another region; give its --region"):
        store.FieldReader(location, ["u"]).open()


def test_a_region_is_for_s3_only(folder: Path, refused: Callable) -> None:
    assert refused(folder / "whole", "--region", "eu-west-1").startswith(
        "--region eu-west-1: only for --store s3"
    )


@pytest.mark.online
def test_a_public_bucket_of_another_region_is_read() -> None:
    """Sea surface temperatures (MUR) in Oregon: named from elsewhere only with the region."""
    location = store.Location("s3://mur-sst/zarr-v1", anonymous=True, region="us-west-2")
    reader = store.FieldReader(location, ["analysed_sst"])
    values = reader.read(
        "analysed_sst", {"time": 0, "latitude": slice(9000, 9010), "longitude": slice(0, 10)}
    )
    assert np.isfinite(values).any()
    elsewhere = store.Location("s3://mur-sst/zarr-v1", anonymous=True, region="eu-west-1")
    with pytest.raises(errors.DataError, match="--region"):
        store.FieldReader(elsewhere, ["analysed_sst"]).open()
