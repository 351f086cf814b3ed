"""Chapter 1: fill the wind between a satellite's swaths, on one device, with Lightning.

    uv run python train.py              # about a minute on two CPU cores
    uv run python train.py --resume     # after a kill: go on, and end at the same weights

You should see a progress bar, the RMSE of the network, of four simple fills (it beats
them) and of optimal interpolation (it does not), and the path of a picture.

Four files hold the lesson: this one, sampling.py, data.py and model.py. The others are
plumbing, one subject each. `train_by_hand.py` is the same without Lightning.
"""

import json
from functools import partial
from pathlib import Path
from time import perf_counter

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

import evaluation
from checkpoints import StepCheckpoint, read_start
from clock import StepClock, peak_memory_gb
from ending import call, run
from options import OUTPUTS, Options, parse_options
from task import make_data, make_datamodule, make_model


def make_trainer(options: Options, callbacks: list[Callback], log: str) -> Trainer:
    """Lightning's loop, as the flags have it."""
    folder = options.output_dir
    every = options.checkpoint_every
    logger = CSVLogger(folder, "", log, flush_logs_every_n_steps=every)
    checkpoints = StepCheckpoint(
        folder, "last", every_n_train_steps=every, enable_version_counter=False
    )
    progress = TQDMProgressBar(options.log_every)
    return Trainer(
        accelerator=options.accelerator,
        devices=1,
        max_epochs=1,  # the sampler's only epoch is the whole run
        max_steps=options.max_steps,
        val_check_interval=options.validate_every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=options.log_every,
        use_distributed_sampler=False,
        enable_model_summary=False,
        logger=logger,
        callbacks=[*callbacks, checkpoints, LearningRateMonitor(), progress],
    )


def train(options: Options) -> dict:
    """Train, judge and draw; return the headline metrics."""
    began = perf_counter()
    first_step, options = read_start(options)
    options, data = make_data(options)
    datamodule = make_datamodule(options, data, first_step)
    model = make_model(options, data)
    clock = StepClock()
    log = f"resumed_at_{first_step}" if options.resume else ""
    trainer = make_trainer(options, [clock], log)

    trainer.fit(model, datamodule=datamodule, ckpt_path=options.resume)
    folder = Path(options.output_dir)
    trainer.save_checkpoint(folder / "last.ckpt")
    tested = trainer.test(model, datamodule=datamodule, verbose=False)[0]

    metrics = {"steps": options.max_steps}
    metrics["climatology_shares"] = data.climatology_shares()
    metrics |= clock.throughput(options.batch_size)
    metrics["peak_memory_gb"] = peak_memory_gb()
    metrics["seconds"] = perf_counter() - began
    patches = datamodule.test
    rmse = evaluation.baselines(data, patches, OUTPUTS)
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
    """Train on the file that is named; errors end with code 2."""
    options = parse_options(__doc__.splitlines()[0], argv)
    checkpoint = f"--resume {options.resume}"
    return call(partial(train, options), checkpoint, options.store)


if __name__ == "__main__":
    run(main)
