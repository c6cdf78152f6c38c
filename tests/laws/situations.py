"""The table of situations: how one is declared, and the small models and batches they share.

    @situation("O1 O2 O3")
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

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from drivers import SGD
from torch import Tensor, nn

LEVELS = ("O1", "O2", "O3")
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
PLAIN = functools.partial(torch.optim.SGD, lr=0.1)


@dataclass(frozen=True)
class Situation:
    """One row.

    levels, halves: where it is run.
    against: "by hand" for the oracle of the same level, "FP32" for plain FP32.
    within: the largest difference of any number; 0 compares bit by bit.  The row's comment says how
        large the effect of the error would be.
    refuses: ampatch raises an error that matches this, by design.
    says: ampatch logs a warning or error that matches this.
    changes_weights: False where no weight may move.
    """

    run: Callable[[Any], None]
    name: str
    levels: str = "O1 O2 O3"
    halves: str = "fp16 bf16"
    against: str = "by hand"
    within: float = 0.0
    refuses: str = ""
    says: str = ""
    changes_weights: bool = True


TABLE: list[Situation] = []


def situation(
    levels: str = "O1 O2 O3", *, cases: dict[str, Any] | None = None, **fields: Any
) -> Callable:
    """Add a row for a function of a driver; `cases`: one for each, with the case's value besides.

    Names of rows are the function's, with the case's behind it.
    """

    def declare(run: Callable[..., None]) -> Callable[..., None]:
        rows = {
            f"{run.__name__}_{name}": functools.partial(run, case=value)
            for name, value in (cases or {}).items()
        }
        for name, row in (rows or {run.__name__: run}).items():
            assert name not in {known.name for known in TABLE}, f"{name}: declared twice"
            TABLE.append(Situation(row, name, levels, **fields))
        return run

    return declare


def network(
    levels: str = "O1 O2 O3", make: Any = SGD, count: int = 4, **fields: Any
) -> Callable[[type], type]:
    """Add a row for a class of models: some ordinary steps."""

    def declare(kind: type) -> type:
        def run(amp: Any) -> None:
            trained(amp, kind(), make, count)

        run.__name__ = kind.__name__
        situation(levels, **fields)(run)
        return kind

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
    return (out.float() - target).square().mean()


def plain_loop(
    amp: Any,
    model: nn.Module,
    optimizer: Any,
    count: int = 3,
    seed: int = 1,
    *,
    on_gradients: Callable[[], object] | None = None,
    after: Callable[[], object] | None = None,
) -> None:
    """Some ordinary steps, with `on_gradients()` between backward and step, and `after()`."""
    for x, y in batches(count, seed):
        optimizer.zero_grad()
        amp.backward(mse(model(x), y), optimizer)
        if on_gradients is not None:
            on_gradients()
        optimizer.step()
        if after is not None:
            after()


def trained(
    amp: Any, net: nn.Module | None = None, make: Any = SGD, count: int = 3, **settings: Any
) -> tuple[nn.Module, Any]:
    """A model (`mlp()` unless given) and its optimizer, started and some ordinary steps on."""
    model, optimizer = amp.start(mlp() if net is None else net, make, **settings)
    plain_loop(amp, model, optimizer, count)
    return model, optimizer


def each(amp: Any, cases: dict[str, Any]) -> Iterator[Any]:
    """Cases that a situation meets one after the other; a failure names the one that was met."""
    for name, case in cases.items():
        amp.case = name
        yield case


def look(amp: Any, model: nn.Module, x: Tensor | None = None) -> None:
    [(seen, _)] = batches(1, seed=9)
    with torch.no_grad():
        amp.record(model(seen if x is None else x))


@network(count=5)
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
