"""Chapter 6: fill the wind between a satellite's swaths, in a run that can be left alone.

    uv run python train.py --resume auto   # start, or go on from the newest checkpoint
    uv run python train.py --store s3://bucket/winds.zarr --checkpoint-dir s3://bucket/run

You should see the RMSE of the network below that of four baselines, and a picture. Kill it
whenever you like and give the same command again: it ends at the same weights, to the bit.
The files beside this one have one subject each. Read this one first, from top to bottom.

Exit codes: 0, finished. 2, something to mend. 75, stopped with a checkpoint: run it again.
1, a rank was lost, or the last checkpoint could not be written: run it again.
"""

import gc
import sys
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from time import perf_counter

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.elastic.multiprocessing.errors import record

import evaluation
from boundary import EXIT_LOST, StepBoundary, Stopped
from checkpoints import BackgroundWriter, Checkpoints, open_checkpoints, print_note
from climatology import load_climatology
from command_line import call_with_store, run
from data import Grid, PatchDataset
from datamodule import WindDataModule
from evaluation import EVAL_SEED, StepClock
from fields import Period, group_by_unit, split_times
from heartbeat import Heartbeat, is_lost_rank, name_lost_rank
from model import FillGaps
from options import Options
from preemption import Preemption
from recovery import BadLoss, LossHistory, SkippingOrder
from resume import Start, delete_later, find_start, refuse_later, skip_batches
from run_record import RunRecord, check_record, make_record, write_record
from store import FieldReader, Location, RequestCounter
from tracking import LossBar, StepTimes, draw_and_report, make_loggers
from validation import BestCheckpoint
from wind_blocks import WindBlocks


def make_data(options: Options, location: Location, start: Start) -> WindDataModule:
    """Patches to train on, to validate on and to test on; none is read yet."""
    reader = FieldReader(location, options.variables, options.level)
    fields = reader.open()
    spans = {
        "--train-times": options.train_times,
        "--validation-times": options.validation_times,
        "--test-times": options.test_times,
    }
    training, validation, test = split_times(fields.time, spans)
    span = options.train_times
    climatology = load_climatology(reader, training, span, options.missing)
    grid = Grid(fields.latitude.values, fields.longitude.values)
    size = options.patch_size
    batch_size = options.batch_size
    per_block = options.patches_per_block

    def make_dataset(period: Period, batch_size: int, seed: int) -> PatchDataset:
        return PatchDataset(
            reader.read_at_once, grid, period, climatology, size, batch_size, seed
        )

    blocks = WindBlocks(
        make_dataset(training, batch_size, options.seed),
        # Its own, because only its reads are counted as the training's.
        FieldReader(location, options.variables, options.level),
        per_block,
    )
    slots = options.shuffle_slots
    order = SkippingOrder(
        len(blocks), batch_size, slots, per_block, options.seed, start.skipped
    )
    return WindDataModule(
        asdict(options),
        order,
        blocks,
        make_dataset(validation, options.eval_samples, EVAL_SEED),
        make_dataset(test, options.eval_samples, EVAL_SEED),
        reader,
        start.step,
        options.num_workers,
        options.start_method,
    )


def make_model(options: Options, data: WindDataModule) -> FillGaps:
    """The network for these data, with its loss and its learning rate."""
    units = group_by_unit(data.reader.open(), options.variables)
    std = data.test.std.flatten().tolist()
    rate = options.learning_rate
    model = FillGaps(std, units, rate, options.max_steps, options.seed, options.padding)
    if options.compile:
        model.model.compile()  # not the LightningModule: self.log would break the graph
    return model


def make_trainer(
    options: Options, callbacks: list[Callback], start: Start, writer: BackgroundWriter
) -> Trainer:
    """Lightning's loop, as the flags have it."""
    timeout = timedelta(seconds=options.process_group_timeout)
    several = options.devices * options.num_nodes > 1
    # Each rank has the same buffers. To send them would make fast ranks wait in each step's
    # forward pass for rank 0, and so seem slow.
    ddp = DDPStrategy(timeout=timeout, broadcast_buffers=False)
    trainer = Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        precision=options.precision,
        strategy=ddp if several else "auto",
        max_epochs=1,  # the sampler's only epoch is the whole run
        max_steps=options.max_steps,
        accumulate_grad_batches=options.accumulate_grad_batches,
        val_check_interval=options.validate_every * options.accumulate_grad_batches,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=options.log_every,
        use_distributed_sampler=False,
        enable_model_summary=False,
        profiler=SimpleProfiler(),
        logger=make_loggers(
            options.loggers,
            options.output_dir,
            start.log,
            start.step,
            options.checkpoint_every,
        ),
        callbacks=[*callbacks, LearningRateMonitor(), LossBar(options.log_every)],
        plugins=[writer],
    )
    # Lightning's handlers send tensors from within a step. Preemption has set its own.
    trainer._signal_connector.register_signal_handlers = lambda: None
    return trainer


def run_from(
    start: Start,
    checkpoints: Checkpoints,
    options: Options,
    location: Location,
    preemption: Preemption,
) -> dict:
    """Train from here to the end; return the headline metrics on rank 0.

    BadLoss at a loss that must not reach a checkpoint.
    """
    began = perf_counter()
    data = make_data(options, location, start)
    training = data.blocks.dataset.period
    record = make_record(asdict(options), data.reader, training, start)
    if start.record:
        check_record(start.record, record)
    model = make_model(options, data)
    writer = BackgroundWriter(checkpoints, options.keep, start.checkpoint)
    boundary = StepBoundary(
        writer,
        preemption,
        LossHistory(options.spike_factor),
        start.skipped,
        options.checkpoint_every,
        options.checkpoint_minutes,
        options.validate_every,
        options.grace,
        options.process_group_timeout,
    )
    clock = StepClock()
    counter = RequestCounter()
    heartbeat = Heartbeat(Path(options.output_dir), options.process_group_timeout)
    times = StepTimes(Path(options.output_dir), options.batch_size, clock)
    best = BestCheckpoint(writer, data.validation, options.full_validation_patches)
    keeper = RunRecord(record)
    # The best one first: it validates, which the clock must not take for steps.
    callbacks = [best, clock, times, counter, heartbeat, boundary, keeper]
    trainer = make_trainer(options, callbacks, start, writer)
    if trainer.is_global_zero:
        delete_later(checkpoints, start.step)
        write_record(record, Path(options.output_dir, start.log))

    trainer.fit(model, datamodule=data, ckpt_path=start.name)
    writer.finish()
    tested = trainer.test(model, datamodule=data, verbose=False)[0]
    if not trainer.is_global_zero:
        return {}
    metrics = {"steps": options.max_steps, "missing_chunks": counter.missing_chunks}
    metrics |= clock.throughput(options.batch_size)
    metrics["peak_memory_gb"] = evaluation.peak_memory_gb()
    if options.count_requests:
        metrics |= counter.per_sample()
    metrics["skipped_batches"] = [list(window) for window in start.skipped]
    units = model.hparams.units
    rmse = evaluation.baselines(data.test, units)
    rmse["U-Net"] = {unit: tested[f"test rmse ({unit})"] for unit in units}
    metrics["rmse"] = rmse
    metrics["seconds"] = perf_counter() - began
    draw_and_report(metrics, options.output_dir, options.test_times, data.test, model)
    if writer.failure:
        print_note(f"the last checkpoint is not there: {writer.failure}")
        raise Stopped(EXIT_LOST)
    return metrics


@record  # torchrun then reports the first error of all ranks
def train(options: Options, location: Location) -> dict:
    """Train to the end, going back to a checkpoint whenever a loss is bad."""
    folder = Path(options.output_dir)
    gc.freeze()  # else the collector stops all reads for 0.4 s to look at modules
    preemption = Preemption(folder, options.max_hours, options.spot)
    place = Location(options.checkpoint_dir, options.endpoint)
    checkpoints = open_checkpoints(replace(place, retry_timeout=options.retry_timeout))
    start = find_start(checkpoints, options.resume, asdict(options))
    if options.resume not in ("last", "auto") and not options.overwrite:
        refuse_later(checkpoints, start.step)
    try:
        while True:
            try:
                return run_from(start, checkpoints, options, location, preemption)
            except BadLoss as bad:
                start = skip_batches(bad, start, checkpoints, asdict(options))
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        print(f"\n{name_lost_rank(folder)}; --resume auto goes on", file=sys.stderr)
        raise Stopped(EXIT_LOST) from error


def main(argv: list[str] | None = None) -> dict:
    """Train on the store that is named, or on a small one; errors end with code 2."""
    return call_with_store(train, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    run(main)
