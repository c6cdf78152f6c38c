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

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from measuring import table
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


Settings = dict[str, Any]

SCALES: dict[str, Settings] = {
    ", loss_scale=1": {"loss_scale": 1.0},
    ", loss_scale=8": {"loss_scale": 8.0},
}
LOSS_SCALING: dict[str, Settings] = {
    "O0": {},
    **{
        f"{level} float16{how}": settings
        for level in ("O1", "O2")
        for how, settings in {**SCALES, " (dynamic)": {}}.items()
    },
    "autocast float16 alone": {"scaling": False},
    "autocast float16, GradScaler": {"scaling": True},
    "O1 bfloat16": {},
    "O2 bfloat16": {},
}
# The scale is 1 throughout: these gradients need none, and a step skipped while the dynamic
# scale finds its place would hide what the table is about.
_FIXED: Settings = {"loss_scale": 1.0}
_NO_MASTERS: Settings = {"loss_scale": 1.0, "master_weights": False}
MASTER_WEIGHTS: dict[str, Settings] = {
    "O0": {},
    "O1 float16": _FIXED,
    "O2 float16": _FIXED,
    "O2 float16, master_weights=False": _NO_MASTERS,
    "O3 float16": {},
    "autocast float16": {"scaling": False},
    "O1 bfloat16": {},
    "O2 bfloat16": {},
    "O2 bfloat16, master_weights=False": _NO_MASTERS,
    "O3 bfloat16": {},
}


def run(problem: Problem, title: str, settings: Settings) -> float:
    """`w` at the end of what a line of the tables says: the level, and the half type."""
    level, _, rest = title.partition(" ")
    dtype = "bfloat16" if rest.startswith("bfloat16") else "float16"
    if level == "autocast":
        return train_by_autocast(problem, dtype, **settings)
    return train(problem, level, dtype, **settings)


def tables() -> tuple[str, str]:
    """Both tables, in Markdown: loss scaling, then master weights."""
    return _table(SMALL_GRADIENTS, LOSS_SCALING), _table(SMALL_UPDATES, MASTER_WEIGHTS)


def _table(problem: Problem, lines: dict[str, Settings]) -> str:
    ends = {"exact arithmetic": problem.exact(problem.steps)}
    ends.update((title, run(problem, title, settings)) for title, settings in lines.items())
    first = (problem.start - problem.target) ** 2
    rows = [
        [title, f"{end:.6f}", f"{(end - problem.target) ** 2 / first:.1e}"]
        for title, end in ends.items()
    ]
    head = ["", f"w after {problem.steps} steps", "squared error / first squared error"]
    return table(head, rows)


def adam_table() -> str:
    """How far Adam's first step moves a weight, by gradient."""
    columns = {
        "FP32, eps=1e-8": (1e-8, torch.float32),
        "float16, eps=1e-8": (1e-8, torch.float16),
        "float16, eps=0.001": (1e-3, torch.float16),
        "bfloat16, eps=1e-8": (1e-8, torch.bfloat16),
    }
    rows = []
    for gradient in (1.0, 1e-2, 1e-3, 1e-4, 0.0):
        moved = [abs(first_adam_step(gradient, *column)) for column in columns.values()]
        rows.append([f"{gradient:g}", *[f"{move:.3f}" for move in moved]])
    return table(["gradient", *columns], rows)
