"""Chapter 1, by hand: the loop of train.py in plain PyTorch.

    uv run python train_by_hand.py              # about a minute on two CPU cores
    uv run python train_by_hand.py --resume     # after a kill: go on, and end at the same weights

You should see the summary of train.py. Both use the same modules for data, network and loss.
"""

import csv
import json
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader
from tqdm import tqdm

import evaluation
from checkpoints import load_checkpoint, resume_options, save_whole
from clock import peak_memory_gb, rates
from data import Data, PatchDataset
from datamodule import eval_loader
from ending import call, run
from model import Batch, UNet, learning_rate_factor, masked_loss
from options import OUTPUTS, Options, parse_options
from steps import StepSampler
from task import make_data

PARTS = {"step", "options", "model", "optimizer", "schedule"}  # of a checkpoint
COLUMNS = ["step", "loss", "learning_rate", "wait_seconds", "work_seconds"]


def train(options: Options) -> dict:
    """Train, judge and draw; return the headline metrics."""
    began = perf_counter()
    saved = load_checkpoint(options.resume, PARTS) if options.resume else None
    if saved:
        options = resume_options(options, saved["options"])
    options, data = make_data(options)
    device = choose_device(options.accelerator)

    torch.manual_seed(options.seed)
    model = UNet(len(options.variables)).to(device)
    optimizer = AdamW(model.parameters(), lr=options.learning_rate)
    factor = partial(learning_rate_factor, max_steps=options.max_steps)
    schedule = LambdaLR(optimizer, factor)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if saved:
        for name, part in state.items():
            part.load_state_dict(saved[name])

    first_step = saved["step"] if saved else 0
    metrics = {"steps": options.max_steps}
    metrics["climatology_shares"] = data.climatology_shares()
    metrics |= take_steps(first_step, state, options, data, device)
    metrics["peak_memory_gb"] = peak_memory_gb()
    metrics["seconds"] = perf_counter() - began
    patches = data.eval_patches(data.test, options.patch_size, options.eval_samples)
    rmse = evaluation.baselines(data, patches, OUTPUTS)
    rmse[evaluation.NETWORK] = evaluate(model, data, patches, device)
    metrics["rmse"] = rmse
    folder = Path(options.output_dir)
    picture = folder / "fill.png"
    evaluation.plot_example(patches, data.units, model).savefig(picture)
    (folder / "summary.json").write_text(json.dumps(metrics, indent=2))
    evaluation.print_summary(metrics, options.test_times, picture)
    return metrics


def choose_device(accelerator: str) -> torch.device:
    """The GPU if there is one, unless the flag says cpu."""
    if accelerator != "cpu" and torch.accelerator.is_available():
        return torch.accelerator.current_accelerator()
    return torch.device("cpu")


def take_steps(
    first_step: int, state: dict, options: Options, data: Data, device: torch.device
) -> dict[str, float]:
    """All steps from the first one on. Returns samples/s and the share of time spent waiting."""
    model, optimizer, schedule = state.values()
    size = options.patch_size
    validation = data.eval_patches(data.validation, size, options.eval_samples)
    batches = iter(train_loader(first_step, options, data))
    folder = Path(options.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    steps = range(first_step, options.max_steps)
    progress = tqdm(steps, initial=first_step, total=options.max_steps, unit="step")
    waits = 0.0
    works = 0.0
    name = f"resumed_at_{first_step}.csv" if options.resume else "metrics.csv"
    with open(folder / name, "w", buffering=1, newline="") as file:
        log = csv.writer(file)
        log.writerow(COLUMNS + [f"rmse ({unit})" for unit in data.units])
        for step in progress:
            learning_rate = schedule.get_last_lr()[0]
            asked = perf_counter()
            batch = next(batches)
            given = perf_counter()
            batch = {name: value.to(device) for name, value in batch.items()}
            loss = train_step(model, optimizer, schedule, batch)
            # On a GPU the kernels are queued by now, and not done: chapter 5 times those.
            wait = given - asked
            work = perf_counter() - given
            if step > first_step:  # the first one starts everything up
                waits += wait
                works += work

            taken = step + 1
            rmse = {}
            if taken % options.validate_every == 0:
                rmse = evaluate(model, data, validation, device)
            if taken % options.log_every == 0 or rmse:
                progress.set_postfix({"loss": loss.item()} | rmse)
                row = [step, loss.item(), learning_rate, wait, work]
                log.writerow([*row, *rmse.values()])
            if taken % options.checkpoint_every == 0:
                save(taken, state, options)
    save(options.max_steps, state, options)
    samples = options.batch_size * (len(steps) - 1)
    return rates(samples, waits + works, waits)


def train_loader(first_step: int, options: Options, data: Data) -> DataLoader:
    """The batches from a step on: to resume, start later."""
    maker = data.maker(data.training, options.patch_size)
    patches = PatchDataset(maker, data.reader, options.batch_size, options.seed)
    sampler = StepSampler(options.batch_size, options.max_steps, first_step)
    return DataLoader(patches, batch_sampler=sampler, num_workers=options.num_workers)


def train_step(
    model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, batch: Batch
) -> torch.Tensor:
    """Forward, loss, backward, update: one optimizer step. Returns the loss."""
    loss = masked_loss(model(batch["input"]), batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    return loss.detach()  # not .item(), which would wait until a GPU is done


@torch.no_grad()
def evaluate(
    model: nn.Module, data: Data, patches: PatchDataset, device: torch.device
) -> dict[str, float]:
    """The RMSE in each unit, over all unseen cells: from summed squares and weights."""
    squares = 0.0
    weights = 0.0
    for batch in eval_loader(patches):
        batch = {name: value.to(device) for name, value in batch.items()}
        error = model(batch["input"]) - batch["target"]
        squares += (batch["weight"] * error**2).sum(dim=(0, 2, 3)).cpu().double()
        weights += batch["weight"].sum().item()
    mean_squares = data.climatology.std**2 * squares.numpy() / weights
    return data.rmse(mean_squares)


def save(step: int, state: dict, options: Options) -> None:
    """Write last.ckpt: all that a run needs to go on."""
    parts = {name: part.state_dict() for name, part in state.items()}
    saved = {"step": step, "options": vars(options), **parts}
    path = Path(options.output_dir, "last.ckpt")
    save_whole(saved, path)


def main(argv: list[str] | None = None) -> dict:
    """Train on the file that is named; errors end with code 2."""
    options = parse_options(__doc__.splitlines()[0], argv, name="train_by_hand")
    checkpoint = f"--resume {options.resume}"
    return call(partial(train, options), checkpoint, options.store)


if __name__ == "__main__":
    run(main)
