"""Loss scaling, master weights and Adam's eps, each where one can compute what must happen.

The two parts are those of Micikevicius et al., "Mixed Precision Training", 2018
(arXiv:1710.03740), section 3.1 (master weights) and section 3.2 (loss scaling).
Here each has a training run of one weight `w` that approaches its target by plain
gradient descent, so that every step is known beforehand:

    loss = weight * mean((w * x - target)**2)        x: 256 times 1
    w   <- w - lr * 2 * weight * (w - target)

and the distance to the target shrinks by `1 - 2 * weight * lr` a step.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import ampatch as amp

ROWS = 256  # examples in the batch: each output gets 1/256 of the loss's gradient


@dataclass(frozen=True)
class Problem:
    """One weight from `start` to `target` in `steps` steps of SGD."""

    start: float
    target: float
    weight: float  # what the squared error is multiplied by
    lr: float
    steps: int

    def exact(self, steps: int) -> float:
        """`w` after `steps` steps, in exact arithmetic."""
        shrink = 1 - 2 * self.weight * self.lr
        return self.target + shrink**steps * (self.start - self.target)


# The distance halves at every step.  The loss is an auxiliary one, of little weight, as they
# are added to a main loss, and the gradient that reaches each output, 2 * weight * distance / 256,
# is 2**-23 at first.  The smallest number of float16 is 2**-24; half of it rounds to zero.
SMALL_GRADIENTS = Problem(start=0.0, target=1.0, weight=2.0**-16, lr=2.0**14, steps=8)

# The distance shrinks by 1/128 at every step; gradients are of ordinary size.  The largest update
# is 2**-7 and float16's numbers from 16 on lie 2**-6 apart: the sum rounds back to 16.
SMALL_UPDATES = Problem(start=16.0, target=17.0, weight=1.0, lr=2.0**-8, steps=300)


def float16_stall(problem: Problem, scale: float = 1.0) -> float:
    """Where `SMALL_GRADIENTS` stops in float16: the first `w` whose scaled gradient is zero.

    Numbers up to 2**-25, half of float16's smallest, round to zero.
    """
    for step in range(problem.steps):
        distance = problem.target - problem.exact(step)
        if scale * 2 * problem.weight * distance / ROWS <= 2.0**-25:
            return problem.exact(step)
    return problem.exact(problem.steps)


def train(problem: Problem, opt_level: str, dtype: str = "float16", **settings: Any) -> float:
    """`w`, as the optimizer holds it, after training with ampatch."""
    model, inputs, targets = _model_and_data(problem)
    optimizer = torch.optim.SGD(model.parameters(), lr=problem.lr)
    amp.initialize(model, optimizer, opt_level=opt_level, dtype=dtype, verbosity=0, **settings)
    for _ in range(problem.steps):
        optimizer.zero_grad()
        loss = problem.weight * F.mse_loss(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    [weight] = amp.master_params(optimizer)
    trained = weight.item()
    amp.deactivate()
    return trained


def train_by_autocast(problem: Problem, dtype: str = "float16", *, scaling: bool) -> float:
    """`w` after training with `torch.autocast`, with or without a GradScaler."""
    model, inputs, targets = _model_and_data(problem)
    optimizer = torch.optim.SGD(model.parameters(), lr=problem.lr)
    scaler = torch.amp.GradScaler("cpu", enabled=scaling)
    for _ in range(problem.steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=getattr(torch, dtype)):
            loss = problem.weight * F.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return model.weight.item()


def _model_and_data(problem: Problem) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, problem.start)
    return model, torch.ones(ROWS, 1), torch.full((ROWS, 1), problem.target)


def first_adam_step(gradient: float, eps: float, dtype: torch.dtype) -> float:
    """How far Adam moves a weight of `dtype` at its first step, in units of its lr.

    In exact arithmetic `gradient / (abs(gradient) + eps)`: 1 for a gradient well above eps.
    """
    weight = nn.Parameter(torch.zeros((), dtype=dtype))
    weight.grad = torch.tensor(gradient, dtype=dtype)
    torch.optim.Adam([weight], lr=1.0, eps=eps).step()
    return -weight.item()


@dataclass(frozen=True)
class Setting:
    """A line of the tables: what it is called, and what to hand to `train`."""

    title: str
    opt_level: str = ""  # empty: torch.autocast
    dtype: str = "float16"
    settings: dict[str, Any] = field(default_factory=dict)

    def run(self, problem: Problem) -> float:
        """`w` at the end."""
        if self.opt_level:
            return train(problem, self.opt_level, self.dtype, **self.settings)
        return train_by_autocast(problem, self.dtype, **self.settings)


LOSS_SCALING = [
    Setting("O0", "O0"),
    Setting("O1 float16, loss_scale=1", "O1", settings={"loss_scale": 1.0}),
    Setting("O1 float16, loss_scale=8", "O1", settings={"loss_scale": 8.0}),
    Setting("O1 float16 (dynamic)", "O1"),
    Setting("O2 float16, loss_scale=1", "O2", settings={"loss_scale": 1.0}),
    Setting("O2 float16, loss_scale=8", "O2", settings={"loss_scale": 8.0}),
    Setting("O2 float16 (dynamic)", "O2"),
    Setting("autocast float16 alone", settings={"scaling": False}),
    Setting("autocast float16, GradScaler", settings={"scaling": True}),
    Setting("O1 bfloat16", "O1", "bfloat16"),
    Setting("O2 bfloat16", "O2", "bfloat16"),
]

# The scale is 1 throughout: these gradients need none, and a step skipped while the dynamic
# scale finds its place would hide what the table is about.
_UNSCALED = {"loss_scale": 1.0}
_NO_MASTERS = {"loss_scale": 1.0, "master_weights": False}
MASTER_WEIGHTS = [
    Setting("O0", "O0"),
    Setting("O1 float16", "O1", settings=_UNSCALED),
    Setting("O2 float16", "O2", settings=_UNSCALED),
    Setting("O2 float16, master_weights=False", "O2", settings=_NO_MASTERS),
    Setting("O3 float16", "O3"),
    Setting("autocast float16", settings={"scaling": False}),
    Setting("O1 bfloat16", "O1", "bfloat16"),
    Setting("O2 bfloat16", "O2", "bfloat16"),
    Setting("O2 bfloat16, master_weights=False", "O2", "bfloat16", _NO_MASTERS),
    Setting("O3 bfloat16", "O3", "bfloat16"),
]


def tables() -> tuple[str, str]:
    """Both tables, in Markdown: loss scaling, then master weights."""
    return _table(SMALL_GRADIENTS, LOSS_SCALING), _table(SMALL_UPDATES, MASTER_WEIGHTS)


def _table(problem: Problem, settings: list[Setting]) -> str:
    ends = {"exact arithmetic": problem.exact(problem.steps)}
    ends.update((setting.title, setting.run(problem)) for setting in settings)
    first = (problem.start - problem.target) ** 2
    lines = [
        f"| | w after {problem.steps} steps | squared error / first squared error |",
        "|---|---|---|",
    ]
    for title, end in ends.items():
        lines.append(f"| {title} | {end:.6f} | {(end - problem.target) ** 2 / first:.1e} |")
    return "\n".join(lines)


def main() -> None:
    """Print both tables."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print("\n\n".join(tables()))


if __name__ == "__main__":
    main()
