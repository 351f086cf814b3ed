"""Appendix, raw PyTorch or Lightning: neither is faster, and Lightning does what the page says."""

import os
import random
import urllib.request
from pathlib import Path
from unittest.mock import patch

import book
import buckets
import fsspec
import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler


def test_lightning_costs_a_few_percent_at_most() -> None:
    runs = [(1, row) for row in book.results("01_setup/results/scripts.json")["rows"]]
    runs += [(row["devices"] + 1, row) for row in book.results("02_multi_gpu/results/commands.json")["rows"]]
    for pair in {number for number, _ in runs}:
        rates = {row["script"]: row["samples_per_second"]["median"] for number, row in runs if number == pair}
        by_lightning = rates.pop("train.py")
        [by_hand] = rates.values()
        assert by_hand * 0.94 < by_lightning < by_hand * 1.06


# ----------------------------------------------------------------------------- what Lightning does unasked


class Line(LightningModule):
    """One linear layer, which writes down what is called, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.calls: list[str] = []
        self.dtypes: set[torch.dtype] = set()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.calls.append("forward")
        prediction = self.layer(batch)
        self.dtypes.add(prediction.dtype)
        return prediction.square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.calls.append("validate")
        self.dtypes.add(self.layer(batch).dtype)

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("zero_grad")

    def on_after_backward(self) -> None:
        self.calls.append("backward")

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("step")

    def on_train_epoch_end(self) -> None:
        self.calls.append("epoch ends")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "max_epochs": 1, "accelerator": "cpu", "devices": 1}
    return Trainer(**quiet | options)


def loader(batches: int) -> DataLoader:
    return DataLoader(torch.ones(2 * batches, 4), batch_size=2)


@pytest.mark.parametrize(("options", "first"), [({}, 2), ({"num_sanity_val_steps": 0}, 0)])
def test_two_batches_are_validated_before_training_and_all_before_the_epoch_ends(
    options: dict, first: int
) -> None:
    model = Line()
    trainer(**options).fit(model, loader(1), loader(3))
    one_step = ["forward", "zero_grad", "backward", "step"]  # and not zero_grad, forward, as by hand
    assert model.calls == first * ["validate"] + one_step + 3 * ["validate"] + ["epoch ends"]


@pytest.mark.parametrize("replace", [True, False])
def test_under_ddp_a_loader_in_order_is_replaced_by_one_that_shuffles(replace: bool) -> None:
    with patch.dict(os.environ):  # where Lightning leaves the rank's variables
        once = trainer(strategy="ddp", use_distributed_sampler=replace)  # a group of one rank
        try:
            once.fit(Line(), loader(3))
            sampler = once.train_dataloader.sampler
        finally:
            torch.distributed.destroy_process_group()
    assert type(sampler) is (DistributedSampler if replace else SequentialSampler)
    assert getattr(sampler, "shuffle", False) is replace


def test_bf16_mixed_is_autocast_in_training_and_validation() -> None:
    model = Line()
    trainer(precision="bf16-mixed").fit(model, loader(1), loader(1))
    assert model.calls.count("validate") == 2  # one in the sanity check
    by_hand = torch.nn.Linear(4, 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert {by_hand(torch.ones(2, 4)).dtype} == model.dtypes == {torch.bfloat16}
    assert model.layer.weight.dtype == by_hand.weight.dtype == torch.float32
    assert trainer(precision="16-mixed").precision_plugin.precision == "bf16-mixed"  # on a CPU


def test_deterministic_outlives_its_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # which Lightning sets, and pytest then puts back
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        trainer(deterministic=True)
        trainer()
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


def test_seed_everything_seeds_the_global_generators_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
    own = np.random.default_rng()

    def draw() -> list[float]:
        seed_everything(1, verbose=False)
        return [random.random(), np.random.rand(), torch.rand(1).item(), own.random()]

    assert [one == other for one, other in zip(draw(), draw())] == [True, True, True, False]


# ---------------------------------------------------------------------------------- checkpoints by URL


def resumed(url: str, steps: int) -> tuple[int, torch.Tensor]:
    """Step and weights of a run that starts from a checkpoint and has no more steps to take."""
    model, again = Line(), trainer(max_epochs=-1, max_steps=steps)
    again.fit(model, loader(steps), ckpt_path=url)
    return again.global_step, model.layer.weight


def test_a_checkpoint_by_url_is_there_and_resumes() -> None:
    files = fsspec.filesystem("memory")
    model, callback = Line(), ModelCheckpoint("memory://raw_or_lightning/run", save_last=True)
    try:
        trainer(enable_checkpointing=True, callbacks=[callback]).fit(model, loader(3))
        assert files.exists("/raw_or_lightning/run/last.ckpt")
        step, weights = resumed("memory://raw_or_lightning/run/last.ckpt", 3)
        assert step == 3
        assert torch.equal(weights, model.layer.weight)
        with files.open("/raw_or_lightning/run/last.ckpt") as file:
            parts = set(torch.load(file, weights_only=True))
        assert parts == {"epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops"} | {
            "callbacks",
            "optimizer_states",
            "lr_schedulers",
        }  # and no state of a random generator

        with fsspec.open("memory://raw_or_lightning/by_hand.ckpt", "wb") as file:
            torch.save(model.state_dict(), file)
        with fsspec.open("memory://raw_or_lightning/by_hand.ckpt") as file:
            assert torch.equal(torch.load(file, weights_only=True)["layer.weight"], model.layer.weight)
    finally:
        files.rm("/raw_or_lightning", recursive=True)


def test_a_checkpoint_waits_for_all_ranks_and_its_callback_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = ModelCheckpoint(tmp_path)
    saving = trainer(enable_checkpointing=True, callbacks=[saver, Callback()])
    assert saving.callbacks[-1] is saver
    saving.fit(Line(), loader(1))
    barriers = []
    monkeypatch.setattr(
        saving.strategy, "barrier", lambda name=None: barriers.append(Path(tmp_path / "x").exists())
    )
    saving.save_checkpoint(tmp_path / "x")
    assert barriers == [True]  # after the file, and so a rank that is alone waits there for ever


@pytest.mark.thorough
def test_a_checkpoint_goes_to_s3_by_obstore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from obstore.fsspec import register

    with buckets.serving(tmp_path, latency_ms=0) as address:
        urllib.request.urlopen(urllib.request.Request(f"{address}/models", method="PUT")).close()
        account = {"ENDPOINT": address, "ALLOW_HTTP": "true", "REGION": "us-east-1"}
        for name, value in (account | {"ACCESS_KEY_ID": "me", "SECRET_ACCESS_KEY": "secret"}).items():
            monkeypatch.setenv(f"AWS_{name}", value)
        register("s3")
        model, callback = Line(), ModelCheckpoint("s3://models/run", save_last=True)
        trainer(enable_checkpointing=True, callbacks=[callback]).fit(model, loader(3))
        step, weights = resumed("s3://models/run/last.ckpt", 3)
    assert step == 3
    assert torch.equal(weights, model.layer.weight)
