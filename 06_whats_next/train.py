"""Chapter 6: fill the wind between a satellite's swaths, in a run that can be left alone.

    uv run python train.py --resume auto   # start, or go on from the newest checkpoint
    uv run python train.py --store s3://bucket/winds.zarr --checkpoint-dir s3://bucket/run

You should see the RMSE of the network below those of four simple fills, then that of optimal
interpolation, and a picture. Kill it whenever you like and give the same command again: it
ends at the same weights, to the bit.
The files beside this one have one subject each. Read this one first, from top to bottom.

Exit codes: 0, finished. 2, something to mend. 75, stopped with a checkpoint: run it again.
1, a rank was lost, or the last checkpoint could not be written: run it again.
"""

import gc
import json
import sys
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.elastic.multiprocessing.errors import record

import task
from clock import StepClock, peak_memory_gb
from command_line import call_with_store
from ending import run
from errors import print_note
from location import Location
from options import Options
from survival.best import BestCheckpoint
from survival.boundary import EXIT_LOST, StepBoundary, Stopped
from survival.checkpoints import BackgroundWriter, open_checkpoints
from survival.heartbeat import Heartbeat, is_lost_rank, name_lost_rank
from survival.preemption import Preemption
from survival.recovery import BadLoss, LossHistory
from survival.requirements import check_end
from survival.resume import Start, delete_later, find_start, refuse_later, skip_batches
from tracking.loggers import LossBar, make_loggers
from tracking.run_record import RunRecord, check_record, make_record, write_record
from tracking.step_times import StepTimes


def make_trainer(
    options: Options, callbacks: list[Callback], start: Start, writer: BackgroundWriter
) -> Trainer:
    """Lightning's loop, as the flags have it."""
    timeout = timedelta(seconds=options.process_group_timeout)
    several = options.devices * options.num_nodes > 1
    micro_batches = options.accumulate_grad_batches
    # Each rank has the same buffers. To send them would make fast ranks wait in each step's
    # forward pass for rank 0, and so seem slow.
    ddp = DDPStrategy(timeout=timeout, broadcast_buffers=False)
    loggers = make_loggers(
        options.loggers,
        folder=options.output_dir,
        version=start.log,
        step=start.step,
        flush_every=options.checkpoint_every,
    )
    trainer = Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        precision=options.precision,
        deterministic=options.deterministic or None,  # None leaves it to torch
        strategy=ddp if several else "auto",
        max_epochs=1,  # the sampler's only epoch is the whole run
        max_steps=options.max_steps,
        accumulate_grad_batches=micro_batches,
        val_check_interval=options.validate_every * micro_batches,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=options.log_every,
        use_distributed_sampler=False,
        enable_model_summary=False,
        logger=loggers,
        callbacks=[
            *callbacks,
            LearningRateMonitor(),
            LossBar(task.LOSS, options.log_every),
        ],
        plugins=[writer],
    )
    # Lightning's handlers send tensors from within a step. Preemption has set its own.
    trainer._signal_connector.register_signal_handlers = lambda: None
    return trainer


def run_from(
    start: Start,
    data: Any,
    options: Options,
    writer: BackgroundWriter,
    preemption: Preemption,
    began: float,
) -> dict:
    """Train from here to the end; return the headline metrics on rank 0.

    `began` is when this process did, by perf_counter. BadLoss at a loss that must not
    reach a checkpoint.
    """
    folder = Path(options.output_dir)
    record = make_record(
        asdict(options),
        task.describe_data(data),
        loss=task.LOSS,
        step=start.step,
        skipped=start.skipped,
    )
    if start.record:
        check_record(start.record, record)
    datamodule = task.make_datamodule(options, data, start.step, start.skipped)
    model = task.make_model(options, data)
    boundary = StepBoundary(
        writer,
        preemption,
        LossHistory(options.spike_factor),
        loss=task.LOSS,
        seed=options.seed,
        skipped=start.skipped,
        every_steps=options.checkpoint_every,
        every_minutes=options.checkpoint_minutes,
        validate_every=options.validate_every,
        grace=options.grace,
        group_timeout=options.process_group_timeout,
    )
    clock = StepClock()
    closer_look = task.closer_look(options, data)
    # The best one first: it validates, which the clock must not take for steps.
    best = BestCheckpoint(writer, task.score, task.HIGHER_IS_BETTER, closer_look)
    times = StepTimes(folder, options.batch_size, clock)
    heartbeat = Heartbeat(folder, options.process_group_timeout)
    keeper = RunRecord(record)
    callbacks = [
        best,
        clock,
        times,
        *task.make_callbacks(),
        heartbeat,
        boundary,
        keeper,
    ]
    trainer = make_trainer(options, callbacks, start, writer)
    if trainer.is_global_zero:
        delete_later(writer.folder, start.step)
        write_record(record, folder / start.log)

    trainer.fit(model, datamodule=datamodule, ckpt_path=start.name)
    writer.finish()
    check_end(trainer)
    tested = trainer.test(model, datamodule=datamodule, verbose=False)[0]
    if not trainer.is_global_zero:
        return {}
    metrics = summarize(options, start, clock)
    trained = [weights for weights in model.parameters() if weights.requires_grad]
    metrics["parameters"] = sum(weights.numel() for weights in trained)
    metrics["tested"] = tested
    metrics["seconds"] = perf_counter() - began
    task.report(metrics, options, trainer)
    (folder / "summary.json").write_text(json.dumps(metrics, indent=2))
    if writer.failure:
        print_note(f"the last checkpoint is not there: {writer.failure}")
        raise Stopped(EXIT_LOST)
    return metrics


def summarize(options: Options, start: Start, clock: StepClock) -> dict:
    """What a run took, and what it left out."""
    metrics = {"steps": options.max_steps}
    metrics |= clock.throughput(options.batch_size)
    metrics["peak_memory_gb"] = peak_memory_gb()
    metrics["skipped_batches"] = [list(window) for window in start.skipped]
    return metrics


@record  # torchrun then reports the first error of all ranks
def train(options: Options, location: Location) -> dict:
    """Train to the end, unless something asks the run to stop or a rank is lost."""
    began = perf_counter()
    folder = Path(options.output_dir)
    gc.freeze()  # else the collector stops all reads for 0.4 s to look at modules
    preemption = Preemption(folder, options.max_hours, options.spot)
    try:
        return train_and_recover(options, location, preemption, began)
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        print(f"\n{name_lost_rank(folder)}; --resume auto goes on", file=sys.stderr)
        raise Stopped(EXIT_LOST) from error
    finally:
        preemption.close()


def train_and_recover(
    options: Options, location: Location, preemption: Preemption, began: float
) -> dict:
    """Begin where --resume says, and go back to a checkpoint whenever a loss is bad."""
    place = Location(options.checkpoint_dir, options.endpoint)
    checkpoints = open_checkpoints(replace(place, retry_timeout=options.retry_timeout))
    start = find_start(checkpoints, options.resume, asdict(options))
    if options.resume not in ("last", "auto") and not options.overwrite:
        refuse_later(checkpoints, start.step)
    if start.name:
        print_note(f"resumed at step {start.step} from {start.name}")
    options = start.take_over(options)
    options, data = task.make_data(options, location)
    higher_is_better = task.HIGHER_IS_BETTER
    while True:
        resumed = start.checkpoint
        writer = BackgroundWriter(checkpoints, options.keep, resumed, higher_is_better)
        try:
            return run_from(start, data, options, writer, preemption, began)
        except BadLoss as bad:
            start = skip_batches(bad, start, checkpoints, asdict(options))
        finally:
            writer.close()


def main(argv: list[str] | None = None) -> dict:
    """Train as the command line says; errors end with code 2."""
    return call_with_store(train, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    run(main)
