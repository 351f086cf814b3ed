"""Chapter 5: fill the wind between a satellite's swaths, from a project of small rooms.

    uv run python train.py                # a small store, made and served on this machine
    uv run python train.py --store s3://bucket/winds.zarr --num-workers 1   # beside a GPU

You should see the RMSE of the network below that of four baselines, and a picture. The
files beside this one have one subject each. Read this one first, from top to bottom.
"""

import gc
import json
import logging
import os
import sys
import warnings
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from time import perf_counter

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed
from torch.distributed.elastic.multiprocessing.errors import record

import evaluation
from block_loader import BlockOrder
from checkpoints import CheckpointError, StepCheckpoint, read_first_step
from climatology import load_climatology
from data import Grid, PatchDataset
from datamodule import WindDataModule
from demo_store import serve_demo_store
from errors import DataError, first_line
from evaluation import EVAL_SAMPLES, EVAL_SEED, StepClock
from fields import Period, group_by_unit, split_times
from model import FillGaps
from options import Options, parse_options, refuse
from store import FieldReader, Location, RequestCounter
from wind_blocks import WindBlocks


def make_data(options: Options, location: Location, first_step: int) -> WindDataModule:
    """Patches to train on, to validate on and to test on; none is read yet."""
    reader = FieldReader(location, options.variables)
    fields = reader.open()
    spans = {
        "--train-times": options.train_times,
        "--validation-times": options.validation_times,
        "--test-times": options.test_times,
    }
    training, validation, test = split_times(fields.time, spans)
    climatology = load_climatology(reader, training, options.train_times)
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
        FieldReader(location, options.variables),  # its own: only its reads are counted
        per_block,
    )
    order = BlockOrder(
        len(blocks), batch_size, options.shuffle_slots, per_block, options.seed
    )
    return WindDataModule(
        asdict(options),
        order,
        blocks,
        make_dataset(validation, EVAL_SAMPLES, EVAL_SEED),
        make_dataset(test, EVAL_SAMPLES, EVAL_SEED),
        first_step,
        options.num_workers,
        options.start_method,
    )


def make_trainer(options: Options, callbacks: list[Callback], log: str) -> Trainer:
    """Lightning's loop, as the flags have it."""
    folder = options.output_dir
    every = options.checkpoint_every
    checkpoints = StepCheckpoint(
        folder, "last", every_n_train_steps=every, enable_version_counter=False
    )
    progress = TQDMProgressBar(options.log_every)
    timeout = timedelta(seconds=options.process_group_timeout)
    several = options.devices * options.num_nodes > 1
    return Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        precision=options.precision,
        strategy=DDPStrategy(timeout=timeout) if several else "auto",
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
        logger=CSVLogger(folder, "", log, flush_logs_every_n_steps=every),
        callbacks=[*callbacks, checkpoints, LearningRateMonitor(), progress],
    )


@record  # torchrun then reports the first error of all ranks
def train(options: Options, location: Location) -> dict:
    """Train, judge and draw; return the headline metrics on rank 0."""
    began = perf_counter()
    first_step = read_first_step(options.resume, asdict(options))
    data = make_data(options, location, first_step)
    gc.freeze()  # else the collector stops all reads for 0.4 s to look at modules
    units = group_by_unit(data.blocks.reader.open(), options.variables)
    std = data.test.std.flatten().tolist()
    steps = options.max_steps
    model = FillGaps(
        std, units, options.learning_rate, steps, options.seed, options.padding
    )
    if options.compile:
        model.model.compile()  # not the LightningModule: self.log would break the graph
    clock = StepClock()
    counter = RequestCounter()
    log = f"resumed_at_{first_step}" if options.resume else ""
    trainer = make_trainer(options, [clock, counter], log)

    trainer.fit(model, datamodule=data, ckpt_path=options.resume)
    folder = Path(options.output_dir)
    trainer.save_checkpoint(folder / "last.ckpt")
    tested = trainer.test(model, datamodule=data, verbose=False)[0]
    if not trainer.is_global_zero:
        return {}

    metrics: dict = {"steps": steps}
    metrics |= clock.throughput(options.batch_size)
    metrics["peak_memory_gb"] = evaluation.peak_memory_gb()
    if options.count_requests:
        metrics |= counter.per_sample()
    rmse = evaluation.baselines(data.test, units)
    rmse["U-Net"] = {unit: tested[f"test rmse ({unit})"] for unit in units}
    metrics["rmse"] = rmse
    picture = folder / "fill.png"
    evaluation.plot_example(data.test, units, model.model).savefig(picture)
    metrics["seconds"] = perf_counter() - began
    (folder / "summary.json").write_text(json.dumps(metrics, indent=2))
    evaluation.print_summary(metrics, options.test_times, picture)
    return metrics


def main(argv: list[str] | None = None) -> dict:
    """Train on the store that is named, or on a small one; errors end with code 2."""
    options = parse_options(__doc__.splitlines()[0], argv)
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning|zarr")
    warnings.filterwarnings("ignore", "Failed to open Zarr store with consolidated")
    named = Location(
        options.store or "", options.endpoint, options.anonymous, options.retry_timeout
    )
    try:
        with nullcontext(named) if options.store else serve_demo_store() as location:
            return train(options, location)
    except DataError as error:
        print(file=sys.stderr)  # below the progress bar
        reason = str(error).split("DataError: ")[-1].strip()  # a worker's has its stack
        if not reason.startswith("--"):
            reason = f"--store {options.store or '(the demo store)'}: {reason}"
        refuse(reason)
    except CheckpointError as error:
        refuse(f"--resume {options.resume}: {error}")
    except RuntimeError as error:
        of_group = isinstance(error, distributed.DistBackendError)
        if not of_group and "gloo" not in str(error):
            raise
        print(f"\n{first_line(error)}", file=sys.stderr)
        reason = "its own last line, above or in that rank's log, says why"
        refuse(f"another rank failed, or does not answer; {reason}")


if __name__ == "__main__":
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    sys.stdout.flush()
    # Not sys.exit: it would draw a progress bar below the reason, and threads of gloo that
    # outlive their group would abort the end of Python.
    os._exit(code)
