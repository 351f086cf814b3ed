"""The network's shapes and edges, its loss, learning rate and metric."""

from itertools import pairwise
from types import SimpleNamespace

import model
import numpy as np
import pytest
import torch

Batch = dict[str, torch.Tensor]


def make_module(**more: object) -> torch.nn.Module:
    """A LightningModule of two winds, that no Trainer holds."""
    winds = {"std": [2.0, 3.0], "units": {"m/s": [0, 1]}}
    module = model.FillGaps(**({"learning_rate": 1e-3, "max_steps": 10, "seed": 0} | winds | more))
    module.on_train_start()
    return module


@pytest.mark.parametrize(("variables", "height", "width"), [(1, 16, 16), (2, 12, 20), (3, 16, 4)])
def test_each_cell_of_each_variable_is_predicted(variables: int, height: int, width: int) -> None:
    network = make_module(std=[1.0] * variables)
    found = network(torch.zeros(5, variables + 1, height, width))
    assert found.shape == (5, variables, height, width)


@pytest.mark.parametrize(("padding", "goes_on"), [("replicate", True), ("zeros", False)])
def test_beyond_its_edge_a_patch_goes_on_if_it_is_asked_to(padding: str, goes_on: bool) -> None:
    """Then the network of a field without a feature has none at the edge."""
    field = torch.tensor([0.5, -0.2, 1.0]).double().view(1, 3, 1, 1).expand(-1, -1, 16, 16)
    found = make_module(padding=padding).double()(field)
    assert torch.allclose(found, found[..., :1, :1]) == goes_on


def batch_of(shares: tuple[float, ...]) -> Batch:
    """A sample for each share of unseen rows, where the weight is a half, in double precision."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn((len(shares), 2, 12, 4), generator=generator).double()
    unseen = torch.stack([(torch.arange(12) < 12 * share).double() for share in shares])
    unseen = unseen[:, None, :, None].expand(-1, 1, -1, 4)
    inputs = torch.cat([target * (1 - unseen), 1 - unseen], dim=1)
    return {"input": inputs, "target": target, "unseen": unseen, "weight": unseen / 2}


def take_step(module: torch.nn.Module, pieces: list[Batch], ranks: int = 1):
    """One step on these micro-batches, as Lightning calls it: the gradients and the loss."""
    logged = {}
    module._trainer = SimpleNamespace(world_size=ranks, accumulate_grad_batches=len(pieces))
    module.log = lambda name, value, **_: logged.update({name: value.item()})
    module.zero_grad()
    for number, piece in enumerate(pieces):
        (module.training_step(piece, number) / len(pieces)).backward()
    module.on_before_optimizer_step(None)
    return [parameter.grad.clone() for parameter in module.parameters()], logged["loss"]


def test_the_loss_is_one_mean_over_all_unseen_cells_in_micro_batches_too() -> None:
    """However unequally many cells are unseen in them; and each step begins at nothing."""
    batch = batch_of((0.9, 0.1, 0.5, 0.3))
    module = make_module().double()
    squares = batch["weight"] * (module(batch["input"]) - batch["target"]) ** 2
    plain = squares.sum() / 2 / batch["unseen"].sum()
    expected = torch.autograd.grad(plain, list(module.parameters()))
    for bounds in ((0, 4), (0, 2, 4), (0, 1, 2, 4)):
        pieces = [{name: part[a:b] for name, part in batch.items()} for a, b in pairwise(bounds)]
        gradients, loss = take_step(module, pieces)
        assert loss == pytest.approx(plain.item())
        torch.testing.assert_close(gradients, list(expected), rtol=1e-6, atol=1e-9)


def test_ranks_divide_by_the_count_of_all(monkeypatch) -> None:
    """DDP averages their gradients, and each logs the loss of the global batch."""
    batch = batch_of((0.9, 0.1, 0.5, 0.3))
    expected, loss = take_step(make_module().double(), [batch])
    halves = [{name: part[a:b] for name, part in batch.items()} for a, b in ((0, 1), (1, 4))]
    everything = torch.stack(
        [model.masked_sums(make_module().double()(half["input"]), half) for half in halves]
    )
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda sums: sums.copy_(everything.detach().sum(0)))
    each = [take_step(make_module().double(), [half], ranks=2) for half in halves]
    assert [logged for _, logged in each] == [pytest.approx(loss)] * 2
    mean = [(one + other) / 2 for one, other in zip(*(gradients for gradients, _ in each))]
    torch.testing.assert_close(mean, expected, rtol=1e-6, atol=1e-9)


def test_a_batch_without_an_unseen_cell_teaches_nothing() -> None:
    gradients, loss = take_step(make_module().double(), [batch_of((0.0,))])
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients)  # a NaN is true


def test_the_sums_of_a_step_are_in_no_checkpoint_and_are_not_broadcast() -> None:
    """DDP would copy rank 0's to all ranks before each forward pass, if they were a buffer."""
    module = make_module().double()
    module.training_step(batch_of((0.5,)), 0)
    assert module.sums.all()
    assert dict(module.named_buffers()).keys() == {"std"}  # the same on every rank
    assert module.state_dict().keys() == dict(module.named_parameters()).keys()


@pytest.mark.parametrize("max_steps", [1, 5, 205])
def test_the_learning_rate_rises_for_a_tenth_of_the_run_and_ends_at_zero(max_steps: int) -> None:
    factors = [model.learning_rate_factor(step, max_steps) for step in range(max_steps)]
    warmup = max(1, max_steps // 10)
    np.testing.assert_allclose(factors[:warmup], (1 + np.arange(warmup)) / warmup)
    assert all(before > after for before, after in pairwise(factors[warmup:]))
    assert 0 <= factors[-1] <= 1
    if max_steps > 1:  # PyTorch asks once more, after the last step
        assert model.learning_rate_factor(max_steps, max_steps) == pytest.approx(0, abs=1e-9)


def test_the_rmse_of_each_unit_is_that_of_a_plain_sum(monkeypatch) -> None:
    """Over unseen cells, by their weights, of a network that predicts a third of the spread; each time anew."""
    units, std = {"K": [1], "m/s": [0, 2]}, np.array([2.0, 3.0, 5.0])
    module = make_module(std=std.tolist(), units=units)
    monkeypatch.setattr(module.model, "forward", lambda inputs: torch.full_like(inputs[:, :3], 1 / 3))
    rng = np.random.default_rng(0)
    targets = [rng.normal(size=(n, 3, 8, 8)) for n in (3, 1)]
    weights = [(rng.random((n, 1, 8, 8)) < 0.6) * rng.random((n, 1, 8, 1)) for n in (3, 1)]
    for testing, prefix, chosen in ((True, "test ", (0, 1)), (False, "", (1,))):
        logged, squares, total = {}, np.zeros(3), 0.0
        module._trainer = SimpleNamespace(testing=testing)
        module.log = lambda name, value, logged=logged, **_: logged.update({name: value.item()})
        for number in chosen:
            target, weight = targets[number], weights[number]
            parts = {"input": np.zeros((len(target), 4, 8, 8)), "target": target, "weight": weight}
            batch = {name: torch.tensor(part, dtype=torch.float32) for name, part in parts.items()}
            module.validation_step(batch, number)
            squares += (weight * (std[:, None, None] * (1 / 3 - target)) ** 2).sum(axis=(0, 2, 3))
            total += weight.sum()
        module.on_validation_epoch_end()
        rmse = {
            f"{prefix}rmse ({unit})": (squares[each].mean() / total) ** 0.5 for unit, each in units.items()
        }
        assert logged == pytest.approx(rmse, rel=1e-5)


def test_the_seed_decides_the_weights() -> None:
    one, same, other = (make_module(seed=seed).model.head.weight for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
