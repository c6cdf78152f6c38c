"""Two gloo ranks at O2: collectives on weights raise no version, and count all the same."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from small_training import backward, data, seeded

import ampatch

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

TENSORS = {
    "half weights": lambda model, optimizer: [p.detach() for p in model.parameters()],
    "their data": lambda model, optimizer: [p.data for p in model.parameters()],
    "state_dict": lambda model, optimizer: list(model.state_dict().values()),
    "data of masters": lambda model, optimizer: [p.data for p in ampatch.master_params(optimizer)],
}


def broadcasting(rank: int, which: str, later: bool) -> list:
    """Rank 0's weights to all, on models that have gone different ways."""
    model = seeded(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=torch.bfloat16, verbosity=0)
    if later:
        backward(model, optimizer, data(rank))
        optimizer.step()
    sent = [tensor.clone() for tensor in TENSORS[which](model, optimizer)]
    for tensor in TENSORS[which](model, optimizer):
        dist.broadcast(tensor, 0)
    seen = model(data()[0]).detach()
    optimizer.zero_grad()
    optimizer.step()
    found = [p.detach().clone() for p in ampatch.master_params(optimizer)]
    return [seen, sent, found, [p.detach().clone() for p in model.parameters()]]


@pytest.mark.parametrize("later", [False, True], ids=["at first", "later"])
@pytest.mark.parametrize("which", TENSORS)
def test_a_broadcast_counts(ranks, which, later):
    (seen, sent, ours, halves), (also_seen, _, theirs, their_halves) = ranks(
        broadcasting, which, later
    )
    assert torch.equal(seen, also_seen)
    assert all(map(torch.equal, halves, their_halves))
    for mine, other, value in zip(ours, theirs, sent, strict=True):
        if value.dtype is torch.float32:
            assert torch.equal(mine, value) and torch.equal(other, value)
        else:
            assert torch.equal(other.bfloat16(), value) and torch.equal(mine.bfloat16(), value)
