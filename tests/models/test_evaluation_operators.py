"""Evaluation without a graph takes torch's own ways: no product that FP32 does not have."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ampatch


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Encoder(nn.Module):
    """Attention with the batch first: its inputs are not contiguous."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x.transpose(0, 1))


def calls(model: nn.Module, x: torch.Tensor) -> Counter:
    model(x)  # the first forward casts its weights one by one
    with Counting() as counting:
        model(x)
    return counting.calls


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("frozen", [False, True])
def test_no_batched_product_where_fp32_has_none(level, half, frozen):
    torch.manual_seed(0)
    model = Encoder().eval()
    if frozen:
        for param in list(model.parameters())[:-1]:
            param.requires_grad_(False)
    plain, x = copy.deepcopy(model), torch.randn(4, 6, 16)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            expected = calls(plain, x)
            ampatch.initialize(model, opt_level=level, dtype=half, verbosity=0)
            found = calls(model, x)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    assert found["bmm"] <= expected["bmm"], (found, expected)
    assert found["addmm"] + found["mm"] > 0
