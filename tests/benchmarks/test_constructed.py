"""Loss scaling, master weights and Adam's eps: the constructed tasks of docs/accuracy.md.

One weight `w` approaches its target by gradient descent, so that every step is known beforehand:

    loss = weight * mean((w * x - target)**2)        x: 256 times 1
    w   <- w - lr * 2 * weight * (w - target)

The page has the result of each row; the formula and O0 are the oracles.
"""

import sys
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from repository import BENCHMARKS, DOCS
from torch import nn

import ampatch as amp

sys.path.append(str(BENCHMARKS))

from result_tables import Results


class Problem(NamedTuple):
    """One weight from `start` to `target` in `steps` steps of SGD."""

    start: float
    target: float
    weight: float  # what the squared error is multiplied by
    lr: float
    steps: int

    def exact(self) -> float:
        """`w` at the end, in exact arithmetic."""
        shrink = 1 - 2 * self.weight * self.lr
        return self.target + shrink**self.steps * (self.start - self.target)


# The distance halves at every step.  What reaches each output, 2 * weight * distance / 256, is
# 2**-23 at first; float16's smallest number is 2**-24, and half of it rounds to zero.  So a loss
# scale of 2**n lasts n steps longer than none.
GRADIENTS = Problem(start=0.0, target=1.0, weight=2.0**-16, lr=2.0**14, steps=8)
# The largest update is 2**-7, and float16's numbers from 16 on lie 2**-6 apart.
UPDATES = Problem(start=16.0, target=17.0, weight=1.0, lr=2.0**-8, steps=300)


def trained(problem, level, dtype="float16", **settings):
    """`w`, as the optimizer holds it, by ampatch or (level "autocast") by torch.amp."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, problem.start)
    inputs, targets = torch.ones(256, 1), torch.full((256, 1), problem.target)
    optimizer = torch.optim.SGD(model.parameters(), lr=problem.lr)
    is_ours = level != "autocast"
    if is_ours:
        amp.initialize(model, optimizer, opt_level=level, dtype=dtype, verbosity=0, **settings)
    scaler = torch.amp.GradScaler("cpu", enabled=settings.get("scaling", False))
    for _ in range(problem.steps):
        optimizer.zero_grad()
        with nullcontext() if is_ours else torch.autocast("cpu", dtype=getattr(torch, dtype)):
            loss = problem.weight * F.mse_loss(model(inputs), targets)
        if is_ours:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    [weight] = amp.master_params(optimizer) if is_ours else model.parameters()
    amp.deactivate()
    return weight.item()


def settings_of(title):
    """A row's arguments of `trained`: `O2 float16, master_weights=False`."""
    level, _, rest = title.partition(" ")
    settings = {"scaling": "GradScaler" in rest} if level == "autocast" else {}
    if "loss_scale=" in rest:
        settings["loss_scale"] = float(rest.partition("=")[2])
    if "master_weights" in rest:
        settings["master_weights"] = False
    return level, "bfloat16" if "bfloat16" in rest else "float16", settings


@pytest.mark.parametrize(
    ("heading", "problem", "fixed"),
    [
        ("Why there is loss scaling", GRADIENTS, {}),
        ("Why there are master weights", UPDATES, {"loss_scale": 1.0}),  # so that none is skipped
    ],
)
def test_the_page_has_what_training_gives(heading, problem, fixed):
    exact, *rows = Results(DOCS / "accuracy.md").tables()[heading]
    column = f"w after {problem.steps} steps"
    assert exact[column] == f"{problem.exact():.6f}" and len(rows) >= 10
    for row in rows:
        level, dtype, settings = settings_of(row[""])
        if level in ("O1", "O2"):
            settings = {**fixed, **settings}
        weight = trained(problem, level, dtype, **settings)
        apart = (weight - problem.target) ** 2 / (problem.start - problem.target) ** 2
        assert list(row.values())[1:] == [f"{weight:.6f}", f"{apart:.1e}"], row


def test_adams_eps_is_zero_in_float16():
    """0.001 * gradient**2 underflows below 5.5e-3, and then nothing is left to divide by."""
    columns = {
        "FP32, eps=1e-8": (1e-8, torch.float32),
        "float16, eps=1e-8": (1e-8, torch.float16),
        "float16, eps=0.001": (1e-3, torch.float16),
        "bfloat16, eps=1e-8": (1e-8, torch.bfloat16),
    }
    rows = Results(DOCS / "accuracy.md").tables()["Why O3 in float16 diverges with Adam"]
    assert len(rows) == 5
    for row in rows:
        for column, (eps, dtype) in columns.items():
            weight = nn.Parameter(torch.zeros((), dtype=dtype))
            weight.grad = torch.tensor(float(row["gradient"]), dtype=dtype)
            torch.optim.Adam([weight], lr=1.0, eps=eps).step()
            assert row[column] == f"{abs(weight.item()):.3f}", (row, column)
    assert [row["float16, eps=1e-8"] for row in rows][2:] == ["inf", "inf", "nan"]
