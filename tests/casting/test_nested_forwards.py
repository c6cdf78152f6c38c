"""Managed forwards within managed forwards: each keeps its own policy to its end."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampatch
from ampatch.session.registry import registry

H = torch.bfloat16
X = torch.ones(2, 2)


class Calls(nn.Module):
    def __init__(self, inside=lambda: None):
        super().__init__()
        self.linear, self.inside = nn.Linear(2, 2), inside

    def forward(self, x):
        self.inside()
        return self.linear(x)


def initialized(model, level):
    return ampatch.initialize(model, opt_level=level, dtype=H, verbosity=0)


def test_a_model_within_a_model_within_itself():
    """A forward that changes nothing pushes nothing; what runs inside must not take that away."""
    depth = []

    def inner():
        if len(depth) < 2:
            depth.append(registry.state.current())
            other(X)
            depth.append(registry.state.current())

    def again():
        if len(depth) < 2:
            model(X)

    model, other = Calls(inner), Calls(again)
    initialized(other, "O0")
    initialized(model, "O1")
    assert model(X).dtype is H
    assert depth[0] is depth[1] is registry.table.managed(model).policy
    assert not registry.state.thread.stack and not registry.state.per_thread


@pytest.mark.parametrize("level, dtype", [("O0", torch.float32), ("O1", H)])
def test_a_recursive_forward_keeps_its_own_policy_to_the_end(level, dtype):
    found = []

    def again():
        if len(found) < 1:
            found.append(None)
            model(X)
            found.append(torch.mm(X, X).dtype)

    model = initialized(Calls(again), level)
    initialized(nn.Linear(2, 2), "O1" if level == "O0" else "O0")
    model(X)
    assert found[1] is dtype
