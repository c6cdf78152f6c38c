"""Two gloo ranks at O2: gradients of several passes add up in FP32, however they are averaged."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ampatch

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

PASSES = 256


class OneWeight(nn.Module):
    """With a weight that gets gradients and one in FP32 beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return (self.weight * x).sum() + 0 * self.norm(x.expand(2, 4)).sum()


def accumulating(rank: int, how: str, dtype: torch.dtype, scaled: bool) -> tuple:
    """1 / PASSES from each pass of rank 0, three times as much on rank 1; the mean is 2."""
    model = OneWeight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=dtype, init_scale=256.0, verbosity=0)
    parallel = model if how == "by hand" else DistributedDataParallel(model)
    x = torch.full((1, 4), (1.0 + 2.0 * rank) / PASSES)
    for index in range(PASSES):
        apart = how == "no_sync" and index < PASSES - 1
        with parallel.no_sync() if apart else contextlib.nullcontext():
            loss = parallel(x)
            if scaled:
                with ampatch.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
    if how == "by hand":
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
    grad = model.weight.grad.clone()
    optimizer.step()
    return grad, next(ampatch.master_params(optimizer)).detach().clone()


WAYS = [
    (torch.float16, True),
    pytest.param(torch.bfloat16, True, marks=pytest.mark.slow),
    (torch.bfloat16, False),
]


@pytest.mark.parametrize(("dtype", "scaled"), WAYS, ids=["fp16", "bf16", "bf16 without a block"])
@pytest.mark.parametrize(
    "how", [pytest.param("each pass", marks=pytest.mark.slow), "no_sync", "by hand"]
)
def test_accumulation_over_ranks_is_in_float32(ranks, how, dtype, scaled):
    (one, first), (two, second) = ranks(accumulating, how, dtype, scaled)
    assert one.dtype is torch.float32 and torch.equal(one, two) and torch.equal(first, second)
    torch.testing.assert_close(one, torch.full((4,), 2.0), rtol=1e-6, atol=0)
    torch.testing.assert_close(first, 1.0 - one)


def with_another_forward(rank: int, level: str | None, which: str, dtype: torch.dtype) -> list:
    """Every second pass is averaged; another forward comes between the model's and its pass."""
    torch.manual_seed(0)
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    if level is not None:
        given = [model, other], [optimizer, others]
        ampatch.initialize(*given, opt_level=level, dtype=dtype, init_scale=256.0, verbosity=0)
    parallel = DistributedDataParallel(model)
    second = {
        "its own": parallel,
        "that of a model without DDP": other,
        "that of another model": DistributedDataParallel(other),
    }[which]
    generator = torch.Generator().manual_seed(rank)
    for step in range(4):
        inputs = torch.randn(8, 4, generator=generator)
        with parallel.no_sync() if step % 2 == 0 else contextlib.nullcontext():
            loss = (parallel(inputs) - second(-inputs)).square().mean()
            if level is None:
                loss.backward()
            else:
                with ampatch.scale_loss(loss, [optimizer, others]) as scaled_loss:
                    scaled_loss.backward()
        others.zero_grad()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [value.detach().clone() for value in model.state_dict().values()]


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16]
)
@pytest.mark.parametrize(
    "which", ["its own", "that of a model without DDP", "that of another model"]
)
def test_another_forward_does_not_lose_what_no_sync_kept_back(which, dtype, ranks):
    expected, _ = ranks(with_another_forward, None, which, dtype)
    first, second = ranks(with_another_forward, "O2", which, dtype)
    assert all(map(torch.equal, first, second))
    for ours, theirs in zip(first, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=4e-3, rtol=0)
