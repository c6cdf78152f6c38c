"""`torch.set_default_dtype(torch.float64)` before or after `initialize` changes no dtype."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from small_training import data, everything, grads, seeded, step

import ampatch


@pytest.fixture(autouse=True)
def restored():
    yield
    torch.set_default_dtype(torch.float32)


def run(level, when, fused):
    """Losses, scale, counts, weights, state and gradients of a training."""
    model, (inputs, targets) = seeded(), data()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    if when == "before":
        torch.set_default_dtype(torch.float64)
    settings = {"init_scale": 64.0, "growth_interval": 2, "verbosity": 0}
    ampatch.initialize(model, optimizer, opt_level=level, **settings)
    if when == "after":
        torch.set_default_dtype(torch.float64)
    losses = []
    for factor in (1.0, 1.0, math.inf, 1.0, 1.0):
        losses.append(F.mse_loss(model(inputs).float(), targets) * factor)
        step(losses[-1], optimizer)
        torch.nn.utils.clip_grad_norm_(ampatch.master_params(optimizer), 1.0)
    found = [*losses, *everything(model, optimizer), *grads(optimizer)]
    scale = ampatch.state_dict(), ampatch.step_counts(optimizer)
    ampatch.deactivate()
    torch.set_default_dtype(torch.float32)
    return scale, [
        value if value.dim() or value.requires_grad else value.float() for value in found
    ]


@pytest.mark.parametrize(
    "scale_lives_on, when, fused",
    [("host", "before", False), ("device", "after", True)],
    indirect=["scale_lives_on"],
)
def test_training_is_the_same(opt_level, when, fused, scale_lives_on):
    """Everything, to the bit, is what it is under the usual default."""
    found, expected = run(opt_level, when, fused), run(opt_level, None, fused)
    assert found[0] == expected[0]
    for one, other in zip(found[1], expected[1], strict=True):
        assert one.dtype is other.dtype and repr(one.tolist()) == repr(other.tolist())  # NaN too
