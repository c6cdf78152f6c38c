"""`torch.set_default_dtype(torch.float64)` before or after `initialize` changes no dtype."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from small_training import data, seeded

import ampatch


@pytest.fixture(autouse=True)
def restored():
    yield
    torch.set_default_dtype(torch.float32)


def run(level, when, fused):
    model = seeded()
    inputs, targets = data()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    if when == "before":
        torch.set_default_dtype(torch.float64)
    settings = {"init_scale": 64.0, "growth_interval": 2, "verbosity": 0}
    ampatch.initialize(model, optimizer, opt_level=level, **settings)
    if when == "after":
        torch.set_default_dtype(torch.float64)
    losses = []
    for factor in (1.0, 1.0, math.inf, 1.0, 1.0):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs).float(), targets) * factor
        with ampatch.scale_loss(loss, optimizer) as scaled:
            assert scaled.dtype is torch.float32
            scaled.backward()
        torch.nn.utils.clip_grad_norm_(ampatch.master_params(optimizer), 1.0)
        optimizer.step()
        losses.append(loss.item())
    found = {
        "losses": losses,
        "dtypes": [p.dtype for p in (*ampatch.master_params(optimizer), *model.parameters())],
        "grads": [p.grad.dtype for p in ampatch.master_params(optimizer)],
        "scale": ampatch.state_dict(),
        "counts": ampatch.step_counts(optimizer),
        "state": [
            (key, value.dtype, value.tolist())
            for state in optimizer.state.values()
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and key != "step"
        ],
        "weights": [value.tolist() for value in model.state_dict().values()],
    }
    ampatch.deactivate()
    torch.set_default_dtype(torch.float32)
    return found


@pytest.mark.parametrize(
    "scale_lives_on, when, fused",
    [("host", "before", False), ("device", "after", True)],
    indirect=["scale_lives_on"],
)
def test_training_is_the_same(opt_level, when, fused, scale_lives_on):
    """Everything, to the bit, is what it is under the usual default."""
    assert repr(run(opt_level, when, fused)) == repr(run(opt_level, None, fused))
