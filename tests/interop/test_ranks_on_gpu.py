"""Two processes on one GPU, over gloo: NCCL takes one process for each GPU."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch as amp

BATCH, WIDTH, STEPS, OVERFLOW_AT = 32, 64, 20, 3
NEAR = {"float16": 0.02, "bfloat16": 0.1}


def train(rank: int, level: str, dtype: str, ranks: int, device: str):
    """The weights after the steps, and which steps were skipped; the last rank overflows once."""
    torch.manual_seed(0)
    hidden = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU()]
    model = nn.Sequential(*hidden, nn.Linear(WIDTH, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    scale = {"loss_scale": "dynamic", "init_scale": 256.0}
    amp.initialize(model, optimizer, opt_level=level, dtype=dtype, verbosity=0, **scale)
    wrapped = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    data, skipped = torch.Generator().manual_seed(1), []
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=data)
        part = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
        loss = F.cross_entropy(wrapped(x[part].to(device)), x[part, :4].argmax(1).to(device))
        if step == OVERFLOW_AT and rank == ranks - 1:
            loss = loss * math.inf
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        if amp.step_was_skipped(optimizer):
            skipped.append(step)
    weights = [param.detach().float().cpu() for param in amp.master_params(optimizer)]
    amp.deactivate()
    return weights, skipped


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_ranks_skip_together_and_stay_equal_to_one_process(level, dtype, ranks):
    (first, skipped), (second, also) = ranks(train, level, dtype, 2, "cuda")
    whole, alone = train(0, level, dtype, 1, "cuda")
    assert skipped == also == alone == [OVERFLOW_AT]
    assert all(map(torch.equal, first, second))
    for one, other in zip(first, whole, strict=True):
        torch.testing.assert_close(one, other, atol=NEAR[dtype], rtol=0)
