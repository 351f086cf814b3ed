"""Chapter 2, by hand: the loop of train.py on any number of devices, in plain PyTorch.

    uv run torchrun --nproc-per-node 2 train_ddp_by_hand.py            # two processes, one result
    uv run torchrun --nproc-per-node 2 train_ddp_by_hand.py --resume   # after a kill

You should see one progress bar, whatever the number of processes, and the RMSE that one
process gives. It is chapter 1's loop and eight more lines, marked DDP 1 to DDP 8.
"""

import csv
import json
import os
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import distributed, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
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
from errors import refuse
from model import Batch, UNet, learning_rate_factor, masked_sums
from options import OUTPUTS, Options, parse_options
from steps import StepSampler
from task import make_data
from workers import worker_options

PARTS = {"step", "options", "model", "optimizer", "schedule"}  # of a checkpoint
COLUMNS = ["step", "loss", "learning_rate", "wait_seconds", "work_seconds"]


@record  # torchrun then reports the first error of all ranks
def train(options: Options) -> dict:
    """Train, judge and draw; return the headline metrics on rank 0."""
    began = perf_counter()
    saved = load_checkpoint(options.resume, PARTS) if options.resume else None
    if saved:
        options = resume_options(options, saved["options"])
    options, data = make_data(options)
    device, backend = choose_device(options.accelerator)
    timeout = timedelta(seconds=options.process_group_timeout)
    distributed.init_process_group(backend, timeout=timeout)  # DDP 2: the ranks meet

    torch.manual_seed(options.seed)
    network = UNet(len(options.variables)).to(device)
    model = DistributedDataParallel(network)  # DDP 3: averages gradients over the ranks
    optimizer = AdamW(model.parameters(), lr=options.learning_rate)
    factor = partial(learning_rate_factor, max_steps=options.max_steps)
    schedule = LambdaLR(optimizer, factor)
    state = {"model": network, "optimizer": optimizer, "schedule": schedule}
    if saved:
        for name, part in state.items():
            part.load_state_dict(saved[name])

    first_step = saved["step"] if saved else 0
    metrics = {"steps": options.max_steps}
    metrics["climatology_shares"] = data.climatology_shares()
    metrics |= take_steps(first_step, model, state, options, data, device)
    metrics["peak_memory_gb"] = peak_memory_gb()
    metrics["seconds"] = perf_counter() - began
    patches = data.eval_patches(data.test, options.patch_size, options.eval_samples)
    tested = evaluate(network, data, patches, device)
    distributed.destroy_process_group()
    if int(os.environ["RANK"]) > 0:
        return {}

    rmse = evaluation.baselines(data, patches, OUTPUTS)
    rmse[evaluation.NETWORK] = tested
    metrics["rmse"] = rmse
    folder = Path(options.output_dir)
    picture = folder / "fill.png"
    evaluation.plot_example(patches, data.units, network).savefig(picture)
    (folder / "summary.json").write_text(json.dumps(metrics, indent=2))
    evaluation.print_summary(metrics, options.test_times, picture)
    return metrics


def choose_device(accelerator: str) -> tuple[torch.device, str]:
    """This rank's device, and what carries messages between devices of its kind."""
    if accelerator == "cpu" or not torch.accelerator.is_available():
        return torch.device("cpu"), "gloo"
    local_rank = int(os.environ["LOCAL_RANK"])
    kind = torch.accelerator.current_accelerator().type
    device = torch.device(kind, local_rank)
    torch.accelerator.set_device_index(local_rank)  # DDP 1: a GPU for each rank
    return device, distributed.get_default_backend_for_device(device)  # nccl for CUDA


def take_steps(
    first_step: int,
    model: DistributedDataParallel,
    state: dict,
    options: Options,
    data: Data,
    device: torch.device,
) -> dict[str, float]:
    """All steps from the first one on. Returns samples/s and the share of time spent waiting."""
    network, optimizer, schedule = state.values()
    rank = distributed.get_rank()
    world_size = distributed.get_world_size()
    size = options.patch_size
    validation = data.eval_patches(data.validation, size, options.eval_samples)
    batches = iter(train_loader(first_step, options, data))
    folder = Path(options.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    steps = range(first_step, options.max_steps)
    shown = {"total": options.max_steps, "unit": "step", "disable": rank > 0}
    progress = tqdm(steps, initial=first_step, **shown)
    waits = 0.0
    works = 0.0
    name = f"resumed_at_{first_step}" if options.resume else "metrics"
    # Each rank has a file, which shows who is slow.
    path = folder / f"{name}_rank_{rank}.csv"
    with open(path, "w", buffering=1, newline="") as file:
        log = csv.writer(file)
        log.writerow(COLUMNS + [f"rmse ({unit})" for unit in data.units])
        for step in progress:
            learning_rate = schedule.get_last_lr()[0]
            asked = perf_counter()
            parts = [next(batches) for _ in range(options.accumulate_grad_batches)]
            given = perf_counter()
            parts = [move(batch, device) for batch in parts]
            loss = train_step(model, optimizer, schedule, parts)
            # On a GPU the kernels are queued by now, and not done: chapter 5 times those.
            wait = given - asked
            work = perf_counter() - given
            if step > first_step:  # the first one starts everything up
                waits += wait
                works += work

            taken = step + 1
            rmse = {}
            if taken % options.validate_every == 0:
                rmse = evaluate(network, data, validation, device)
            if taken % options.log_every == 0 or rmse:
                distributed.all_reduce(loss)
                mean = loss.item() / world_size
                progress.set_postfix({"loss": mean} | rmse)
                row = [step, mean, learning_rate, wait, work]
                log.writerow([*row, *rmse.values()])
            if taken % options.checkpoint_every == 0:
                save(taken, state, options)
    save(options.max_steps, state, options)
    samples = options.batch_size * (len(steps) - 1)
    return rates(samples, waits + works, waits)


def train_loader(first_step: int, options: Options, data: Data) -> DataLoader:
    """This rank's micro-batches from a step on: to resume, start later."""
    maker = data.maker(data.training, options.patch_size)
    patches = PatchDataset(maker, data.reader, options.batch_size, options.seed)
    sampler = StepSampler(
        options.batch_size,
        options.max_steps,
        first_step,
        rank=distributed.get_rank(),  # DDP 4: a slice of each batch for each rank
        world_size=distributed.get_world_size(),
        accumulate_grad_batches=options.accumulate_grad_batches,
    )
    workers = worker_options(options.num_workers, options.start_method)
    return DataLoader(patches, batch_sampler=sampler, **workers)


def move(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device."""
    return {name: value.to(device) for name, value in batch.items()}


def train_step(
    model: DistributedDataParallel,
    optimizer: Optimizer,
    schedule: LRScheduler,
    batches: list[Batch],
) -> torch.Tensor:
    """One optimizer step of all ranks together, from this rank's micro-batches.

    Returns this rank's part of the loss; their mean is the loss of the whole batch.
    """
    counts = [batch["unseen"].sum() for batch in batches]
    unseen = torch.stack(counts).sum()
    distributed.all_reduce(unseen)  # DDP 5: one count for the whole batch
    unseen = unseen.clamp(min=1)
    world_size = distributed.get_world_size()
    optimizer.zero_grad()
    parts = []
    for batch in batches:
        # Gradients add up on each rank, and the last backward pass sends them.
        is_last = batch is batches[-1]
        with nullcontext() if is_last else model.no_sync():
            squares, _ = masked_sums(model(batch["input"]), batch)
            part = squares * world_size / unseen  # DDP 6: a sum is world_size averages
            part.backward()
        parts.append(part.detach())
    optimizer.step()
    schedule.step()
    return torch.stack(parts).sum()  # not .item(), which would wait until a GPU is done


@torch.no_grad()
def evaluate(
    network: nn.Module, data: Data, patches: PatchDataset, device: torch.device
) -> dict[str, float]:
    """The RMSE in each unit, over all unseen cells: from squares and weights of all ranks."""
    variables = len(data.climatology.std)
    sums = torch.zeros(variables + 1, dtype=torch.float64, device=device)
    share = (distributed.get_rank(), distributed.get_world_size())
    for batch in eval_loader(patches, *share):
        batch = move(batch, device)
        error = network(batch["input"]) - batch["target"]
        sums[:-1] += (batch["weight"] * error**2).sum(dim=(0, 2, 3))
        sums[-1] += batch["weight"].sum()
    distributed.all_reduce(sums)  # DDP 7: no mean of RMSEs
    *squares, weights = sums.tolist()
    mean_squares = data.climatology.std**2 * squares / weights
    return data.rmse(mean_squares)


def save(step: int, state: dict, options: Options) -> None:
    """Write last.ckpt: all that a run needs to go on."""
    if distributed.get_rank() == 0:  # DDP 8: one writes, and enters no collective here
        parts = {name: part.state_dict() for name, part in state.items()}
        saved = {"step": step, "options": vars(options), **parts}
        path = Path(options.output_dir, "last.ckpt")
        save_whole(saved, path)


def main(argv: list[str] | None = None) -> dict:
    """Train on the file that is named; errors end with code 2."""
    options = parse_options(__doc__.splitlines()[0], argv, name="train_ddp_by_hand")
    if "RANK" not in os.environ:
        refuse("start it by torchrun --nproc-per-node N, for N processes")
    checkpoint = f"--resume {options.resume}"
    return call(partial(train, options), checkpoint, options.store)


if __name__ == "__main__":
    run(main)
