"""A small network, made data, and what a run in mixed precision has to show."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ampatch

CLASSES = 3


def network() -> nn.Module:
    """Half at O2, but for the normalisation."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _dataset(rows: int = 96) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(rows, 8, generator=generator)
    return TensorDataset(inputs, (inputs @ torch.randn(8, CLASSES, generator=generator)).argmax(1))


DATASET = _dataset()  # a row's class is the largest of three fixed projections: can be learnt


def loader() -> DataLoader:
    """Six batches, the same in the same order each time."""
    return DataLoader(DATASET, batch_size=16, shuffle=False)


def float_losses(
    epochs: int,
    make: Callable[[], nn.Module] = network,
    batches: Iterable[tuple[Tensor, Tensor]] | None = None,
    clip: Callable[[Any], Any] | None = None,
) -> list[float]:
    """Every step's loss in FP32, by a loop of our own: what a client's run is held against."""
    assert not ampatch.session.session.registry.sessions, "this would run in half"
    model = make()
    optimizer = optimizer_of(model)
    losses = []
    for _ in range(epochs):
        for inputs, targets in batches or loader():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            if clip is not None:
                clip(model.parameters())
            optimizer.step()
            losses.append(loss.item())
    return losses


def assert_falls(losses: list[float], factor: float = 0.5) -> None:
    """The last steps' mean is below `factor` times the first ones'."""
    few = len(losses) // 4
    assert few and sum(losses[-few:]) < factor * sum(losses[:few]), losses


def assert_close(losses: list[float], expected: list[float], half: torch.dtype) -> None:
    """Near the FP32 run's, step by step, but not the same numbers: those would be FP32's."""
    tolerance = 0.02 if half is torch.float16 else 0.1
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=tolerance
    )
    assert losses != expected


def half_parameters(model: nn.Module, half: torch.dtype) -> list[str]:
    """The names of the parameters held in half."""
    return [name for name, param in model.named_parameters() if param.dtype is half]
