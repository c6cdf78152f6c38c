"""What each framework's runs are asked for and give back, and the network and data they train.

`runs_with_FRAMEWORK.py` beside the tests of the integrations has one function, `run(plan)`, which
trains `network()` on `dataset()` with that framework and returns a `Run`.  `watched_runs.py` runs
it and looks on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import ampatch

CLASSES = 3
BATCH = 8
BATCHES = 16  # in one epoch
LEARNING_RATE = 0.05
MOMENTUM = 0.9


@dataclass(frozen=True)
class Plan:
    """One training run: one epoch of `dataset()`, not shuffled, SGD with momentum."""

    folder: Path
    precision: str = "ampatch"  # or "float32", or "amp": the framework's own
    opt_level: str = "O1"  # of ampatch
    dtype: str = "float16"  # of ampatch and of the framework's own AMP
    clip: float | None = None  # the largest norm of the gradients
    accumulate: int = 1  # batches in a step
    stop_after: int | None = None  # batches; the run then saves a checkpoint into `folder`
    resume: bool = False  # from the checkpoint in `folder`, with the batches after it
    init_scale: float = 1024.0  # of the loss; of ampatch, and of the framework where it says so

    @property
    def settings(self) -> dict[str, Any]:
        return {"opt_level": self.opt_level, "dtype": self.dtype, "init_scale": self.init_scale}

    def end(self, losses: list[float], weights: Mapping[str, Tensor]) -> Run:
        """What the run gave; its session is closed."""
        scale = ampatch.loss_scale() if self.precision == "ampatch" else 1.0
        copies = {name: value.detach().float().clone() for name, value in weights.items()}
        ampatch.deactivate()
        return Run(losses, copies, scale)


@dataclass(frozen=True)
class Run:
    losses: list[float]  # one a batch, unscaled, of this rank's part
    weights: dict[str, Tensor]  # by the names of `network().state_dict()`
    loss_scale: float  # at the end; 1.0 without one


def network() -> nn.Module:
    """Half at O2, but for the normalisation."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))
    for layer in (layers[0], layers[1]):
        layer.register_forward_pre_hook(_note)
    return layers


WEIGHTS_SEEN: set[tuple[str, torch.dtype]] = set()
"""Layers of networks whose forward ran, with the dtypes that their weights had then."""


def _note(layer: nn.Module, _: tuple) -> None:
    WEIGHTS_SEEN.add((type(layer).__name__, layer.weight.dtype))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def _rows() -> tuple[Tensor, Tensor]:
    """A row's class is the largest of three fixed projections, which can be learnt."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH * BATCHES, 8, generator=generator)
    return inputs, (inputs @ torch.randn(8, CLASSES, generator=generator)).argmax(1)


ROWS = _rows()  # made at the import: a session with casts would change classes


def dataset() -> TensorDataset:
    return TensorDataset(*ROWS)


def batches(done: int = 0) -> DataLoader:
    """For loops that take any batches: those of this rank, but for the first `done`."""
    rows = dataset()
    share = DistributedSampler(rows, shuffle=False) if dist.is_initialized() else range(len(rows))
    return DataLoader(Subset(rows, list(share)[BATCH * done :]), batch_size=BATCH)
