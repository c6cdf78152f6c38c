"""The table of situations: how one is declared, and the small models and batches they share.

    @situation("O1 O2 O3", letter="m")
    def grads_set_to_none_by_hand(amp):
        model, optimizer = amp.start(mlp())
        for x, y in batches(4):
            amp.backward(mse(model(x), y), optimizer)
            optimizer.step()
            for p in model.parameters():
                p.grad = None

`amp` is one of the two `drivers`.  Losses, what `amp.record` was given and the final FP32 weights
are compared, bit by bit unless the row says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEVELS = ("O1", "O2", "O3")
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Situation:
    """One row; see `situation` for the fields."""

    run: Callable[[Any], None]
    levels: tuple[str, ...]
    halves: tuple[str, ...]
    letter: str
    against: str
    within: float
    refuses: str
    says: str
    changes_weights: bool

    @property
    def name(self) -> str:
        return self.run.__name__


TABLE: list[Situation] = []


def situation(
    levels: str = "O1 O2 O3",
    *,
    halves: str = "fp16 bf16",
    letter: str = "",
    against: str = "by hand",
    within: float = 0.0,
    refuses: str = "",
    says: str = "",
    changes_weights: bool = True,
) -> Callable:
    """Add a row for a function of a driver.

    Args:
        levels, halves: where it is run.
        letter: of the list of silent errors that it holds down, if any.
        against: "by hand" for the oracle of the same level, "FP32" for plain FP32.
        within: the largest difference of any number; 0 compares bit by bit.  The row's comment
            says how large the effect of the error would be.
        refuses: ampatch raises an error that matches this, by design.
        says: ampatch logs a warning or error that matches this.
        changes_weights: False where no weight may move.
    """

    def declare(run: Callable[[Any], None]) -> Callable[[Any], None]:
        assert run.__name__ not in {row.name for row in TABLE}, f"{run.__name__}: declared twice"
        TABLE.append(
            Situation(
                run,
                tuple(levels.split()),
                tuple(halves.split()),
                letter,
                against,
                within,
                refuses,
                says,
                changes_weights,
            )
        )
        return run

    return declare


def mlp(seed: int = 0, width: int = 8, norm: bool = False) -> nn.Sequential:
    """Four inputs, two outputs."""
    torch.manual_seed(seed)
    middle = [nn.BatchNorm1d(width)] if norm else []
    return nn.Sequential(nn.Linear(4, width), *middle, nn.Tanh(), nn.Linear(width, 2))


def batches(count: int = 4, seed: int = 1, rows: int = 6) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs for `mlp` and targets."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(rows, 4, generator=generator)
        yield x, torch.randn(rows, 2, generator=generator)


def mse(out: Tensor, target: Tensor) -> Tensor:
    """A loss in FP32 under any autocast."""
    return (out.float() - target).square().mean()


def plain_loop(amp: Any, model: nn.Module, optimizer: Any, count: int = 3, seed: int = 1) -> None:
    """Some ordinary steps."""
    for x, y in batches(count, seed):
        amp.step(mse(model(x), y), optimizer)


class Block(nn.Module):
    """A residual block with a method besides forward, and a weight that is used twice."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.encode(x)
        return self.head(x + F.relu(self.second(self.second(x))))
