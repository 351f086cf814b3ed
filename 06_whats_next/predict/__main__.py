"""Fill whole maps with a checkpoint: patch by patch, on one device or several.

    uv run python -m predict CKPT --store winds.zarr --times 1991 1992 --output filled.zarr

You should see a progress bar, and then where the maps are. Stop it whenever you like: the
same command goes on with the maps that are not there yet, and ends at the same bytes, on
a CPU with the same number of threads.
"""

import argparse
import json
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils.data import DataLoader

from arguments import add_options
from checks import check_folder
from command_line import call_at, make_location
from devices import set_devices
from ending import run
from errors import DataError, print_note, program, refuse
from location import Location
from options import DeviceOptions, StoreOptions
from predict.map_store import (
    FILLED,
    NO_VALUE,
    OBSERVED,
    MapStore,
    require,
    write_netcdf,
)
from predict.maps import OVERLAP, MapDataset, choose_overlap, load_model, make_maps
from store import FieldReader
from store_checks import check_icechunk, check_secrets, check_server, check_store
from store_checksum import sha256_of_values


class MissingMaps(LightningDataModule):
    """The maps that are not in the output yet, each for one of the ranks."""

    def __init__(self, maps: MapDataset, output: MapStore, settings: str):
        super().__init__()
        # There may be fewer maps than ranks.
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self.maps = maps
        self.output = output
        self.settings = settings

    def predict_dataloader(self) -> DataLoader:
        numbers = []
        if self.trainer.is_global_zero:
            self.output.prepare(self.maps, self.settings)
            numbers = self.output.missing()
        # Of rank 0, because other ranks may see maps that a faster rank has written.
        numbers = self.trainer.strategy.broadcast(numbers)
        own = numbers[self.trainer.global_rank :: self.trainer.world_size]
        return DataLoader(self.maps, sampler=own, batch_size=None)


class MapWriter(BasePredictionWriter):
    """Writes each map as soon as it is filled."""

    def __init__(self, maps: MapDataset, output: MapStore):
        super().__init__("batch")
        self.maps = maps
        self.output = output

    def write_on_batch_end(
        self,
        trainer: Trainer,
        module: LightningModule,
        prediction: torch.Tensor,
        batch_indices: Any,
        batch: dict[str, Any],
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        known = {name: np.asarray(batch[name].cpu()) for name in ("values", "mean")}
        known["seen"] = batch["seen"].cpu().numpy()
        filled = self.maps.fill(known, prediction.cpu().numpy())
        flags = np.where(known["seen"], OBSERVED, FILLED).astype("int8")
        flags[np.isnan(filled).any(axis=0)] = NO_VALUE
        names = self.maps.reader.variables
        self.output.write(int(batch["number"]), names, filled, flags)


def make_parser() -> argparse.ArgumentParser:
    """Each option and its default."""
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    summary = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(
        prog=program(),
        description=summary,
        formatter_class=show_defaults,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("checkpoint", type=Path, help="one that train.py wrote")
    add_options(parser, StoreOptions)
    climatology = "that of the training, if --store is another: for the climatology"
    add("--training-store", metavar="STORE", help=climatology)
    times = {"nargs": 2, "metavar": ("FIRST", "LAST")}
    add("--times", **times, default=["1991", "1992"], help="dates or years to fill")
    hidden = "what is to be filled: what simulated swaths leave out, or what is missing"
    add("--gaps", choices=("swaths", "missing"), default="swaths", help=hidden)
    add("--seed", type=int, default=0, help="decides the simulated swaths")
    add("--overlap", type=int, help=OVERLAP)
    add_options(parser, DeviceOptions)
    add("--output", type=Path, default="outputs/filled.zarr", help="*.zarr or *.nc")
    return parser


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options of a command line; exits with code 2 and a remedy if one is wrong."""
    args = make_parser().parse_args(argv)
    check_secrets(args, "store", "endpoint", "training_store")
    check_store("--store", args.store)
    check_store("--training-store", args.training_store)
    check_server(args, "training_store")
    check_icechunk(args)
    if args.output.suffix not in (".zarr", ".nc"):
        refuse(f"--output {args.output}: give a name that ends in .zarr or .nc")
    check_folder("--output", str(args.output.parent))
    for name in ("overlap", "seed"):
        value = getattr(args, name)
        if value is not None and value < 0:
            refuse(f"--{name} {value}: too small; give at least 0")
    set_devices(args)
    return args


def predict(args: argparse.Namespace, location: Location) -> Path:
    """Fill the maps that are not there yet; return where all of them are."""
    model, record = load_model(args.checkpoint)
    variables = record["options"]["variables"]
    level = record["options"]["level"]
    asked_for = (variables, level, args.missing_chunks)
    reader = FieldReader(location, *asked_for)
    training = reader
    if args.training_store:
        snapshot = record["options"].get("snapshot")  # which older runs do not say
        other = replace(
            location, url=args.training_store, icechunk=None, snapshot=snapshot
        )
        training = FieldReader(other, *asked_for)
    seed = args.seed if args.gaps == "swaths" else None
    overlap = choose_overlap(args.overlap, record)
    maps = make_maps(
        reader,
        training,
        times=args.times,
        model=model,
        record=record,
        overlap=overlap,
        seed=seed,
        folder=Path(args.climatology_dir),
    )
    for note in [*reader.notes, maps.describe_gaps()]:
        if note:
            print_note(note)
    parts = {
        "checkpoint": sha256(args.checkpoint.read_bytes()).hexdigest(),
        "values": sha256_of_values(reader, maps.period),
        "times": args.times,
        "gaps": args.gaps,
        "seed": args.seed,
        "overlap": overlap,
    }
    settings = json.dumps(parts, sort_keys=True)
    is_netcdf = args.output.suffix == ".nc"
    if is_netcdf and args.output.exists():
        require(args.output, settings)  # it is finished
        return args.output
    store = args.output.with_suffix(".nc.zarr") if is_netcdf else args.output
    output = MapStore(store)
    trainer = make_trainer(args, MapWriter(maps, output))
    data = MissingMaps(maps, output, settings)
    try:
        trainer.predict(model, datamodule=data, return_predictions=False)
        # Where the ranks meet: Lightning has moved the model back to the CPU by now.
        device = trainer.strategy.root_device
        missing = torch.tensor(len(reader.traffic.missing), device=device)
        missing = trainer.strategy.reduce(missing, reduce_op="sum")  # all have written
        if trainer.is_global_zero and is_netcdf:
            write_netcdf(store, args.output)
    except OSError as error:
        reason = f"{error.strerror or error}; the same command goes on"
        raise DataError(f"--output {args.output}: {reason}") from error
    if trainer.is_global_zero:
        if missing:
            print(f"missing chunks that were asked for: {int(missing)}")
        print(f"{len(maps)} maps in {args.output}")
    return args.output


def make_trainer(args: argparse.Namespace, writer: MapWriter) -> Trainer:
    """Lightning's loop over the maps, on the devices that the flags name."""
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.num_nodes,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[writer],
    )
    # Lightning's handlers would let the loop go on after a SIGTERM.
    trainer._signal_connector.register_signal_handlers = lambda: None
    return trainer


def main(argv: list[str] | None = None) -> Path:
    """Fill the maps that the command line names."""
    args = parse(argv)
    name = f"checkpoint {args.checkpoint}"
    return call_at(partial(predict, args), make_location(args), name)


if __name__ == "__main__":
    run(main)
