"""Chapter 3: fill the wind between a satellite's swaths, out of a bucket.

    uv run python train.py                # a small store, made and served on this machine
    uv run python train.py --store s3://bucket/winds.zarr     # or gs://, https://, a path
    uv run python train.py --store gs://weatherbench2/... --anonymous

You should see what chapter 2 shows, and how many requests and bytes each sample has cost.
The files beside this one have one subject each. Read this one first, and then store.py,
which is this chapter's lesson. `make_store.py` makes such a store from NetCDF files;
`local_s3.py` is the server.
"""

import gc
import json
from datetime import timedelta
from pathlib import Path
from time import perf_counter

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.elastic.multiprocessing.errors import record

import evaluation
from checkpoints import StepCheckpoint, read_start
from clock import StepClock, peak_memory_gb
from command_line import call_with_store
from ending import run
from location import Location
from options import Options
from store import OneSnapshot, RequestCounter
from task import make_data, make_datamodule, make_model


def make_trainer(options: Options, callbacks: list[Callback], log: str) -> Trainer:
    """Lightning's loop, as the flags have it."""
    folder = options.output_dir
    every = options.checkpoint_every
    micro_batches = options.accumulate_grad_batches
    logger = CSVLogger(folder, "", log, flush_logs_every_n_steps=every)
    checkpoints = StepCheckpoint(
        folder, "last", every_n_train_steps=every, enable_version_counter=False
    )
    progress = TQDMProgressBar(options.log_every)
    timeout = timedelta(seconds=options.process_group_timeout)
    ddp = DDPStrategy(timeout=timeout)
    several = options.devices * options.num_nodes > 1
    return Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
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
        logger=logger,
        callbacks=[*callbacks, checkpoints, LearningRateMonitor(), progress],
    )


@record  # torchrun then reports the first error of all ranks
def train(options: Options, location: Location) -> dict:
    """Train, judge and draw; return the headline metrics on rank 0."""
    began = perf_counter()
    first_step, options = read_start(options)
    options, data = make_data(options, location)
    gc.freeze()  # else the collector stops all reads for 0.4 s to look at modules
    datamodule = make_datamodule(options, data, first_step)
    model = make_model(options, data)
    clock = StepClock()
    counter = RequestCounter()
    log = f"resumed_at_{first_step}" if options.resume else ""
    trainer = make_trainer(options, [clock, counter, OneSnapshot()], log)

    trainer.fit(model, datamodule=datamodule, ckpt_path=options.resume)
    folder = Path(options.output_dir)
    trainer.save_checkpoint(folder / "last.ckpt")
    tested = trainer.test(model, datamodule=datamodule, verbose=False)[0]
    if not trainer.is_global_zero:
        return {}

    metrics = {"steps": options.max_steps, "missing_chunks": counter.missing_chunks}
    metrics["climatology_shares"] = data.climatology_shares()
    metrics |= clock.throughput(options.batch_size)
    metrics["peak_memory_gb"] = peak_memory_gb()
    if options.count_requests:
        metrics |= counter.per_sample()
    metrics["seconds"] = perf_counter() - began
    patches = datamodule.test
    rmse = evaluation.baselines(data, patches, Path(options.climatology_dir))
    rmse[evaluation.NETWORK] = {
        unit: tested[f"test rmse ({unit})"] for unit in data.units
    }
    metrics["rmse"] = rmse
    picture = folder / "fill.png"
    evaluation.plot_example(patches, data.units, model.model).savefig(picture)
    (folder / "summary.json").write_text(json.dumps(metrics, indent=2))
    evaluation.print_summary(metrics, options.test_times, picture)
    return metrics


def main(argv: list[str] | None = None) -> dict:
    """Train on the store that is named, or on a small one; errors end with code 2."""
    return call_with_store(train, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    run(main)
