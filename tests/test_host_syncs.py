"""How often a step waits for the device."""

from __future__ import annotations

import collections
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ampatch


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for the device."""

    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "_local_scalar_dense" in str(function) or "is_nonzero" in str(function):
            self.count["reads"] += 1
        return function(*args, **(kwargs or {}))


def test_the_counter_sees_a_read():
    with Reads() as reads:
        torch.ones(()).item()
        bool(torch.ones(()) > 0)
    assert reads.count["reads"] >= 2


# A dispatch mode has torch register each operator at its first use; let it, once.
for _name in ("_amp_update_scale_", "_foreach_copy_", "_fused_adam_", "_fused_adamw_"):
    getattr(torch.ops.aten, _name)
for _name in ("_fused_sgd_", "_fused_adagrad_", "_amp_foreach_non_finite_check_and_unscale_"):
    getattr(torch.ops.aten, _name)

FUSED = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]
CASES = [
    *[(kind, dict(fused=True), "dynamic", torch.float16, 0) for kind in FUSED],
    (torch.optim.SGD, dict(foreach=True), "dynamic", torch.float16, 1),
    (torch.optim.RMSprop, dict(foreach=True), "dynamic", torch.float16, 1),
    (torch.optim.SGD, dict(foreach=True), 128.0, torch.float16, 0),
    (torch.optim.SGD, dict(foreach=True), None, torch.bfloat16, 0),
]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind, options, scale, dtype, expected", CASES)
def test_host_syncs_per_step(kind, options, scale, dtype, expected, level):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = kind(model.parameters(), lr=0.01, **options)
    ampatch.initialize(
        model, optimizer, opt_level=level, loss_scale=scale, dtype=dtype, verbosity=0
    )
    x = torch.randn(3, 4)
    counts = []
    for _ in range(4):
        with Reads() as reads:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            with ampatch.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            in_block = reads.count["reads"]
            optimizer.step()
        counts.append((in_block, reads.count["reads"]))
    assert counts[1:] == [(0, expected)] * 3  # masters are made in the first


@pytest.mark.parametrize("kind", FUSED)
def test_fused_optimizers_skip_in_the_kernel(kind):
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    ampatch.initialize(model, optimizer, opt_level="O2", init_scale=256.0, verbosity=0)
    skipped = []
    for factor in (1.0, math.inf, 1.0):
        before = [p.detach().clone() for p in ampatch.master_params(optimizer)]
        with ampatch.scale_loss(model(torch.ones(1, 3)).sum() * factor, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        same = all(map(torch.equal, before, ampatch.master_params(optimizer)))
        skipped.append((ampatch.step_was_skipped(optimizer), same))
    assert skipped == [(False, False), (True, True), (False, False)]
