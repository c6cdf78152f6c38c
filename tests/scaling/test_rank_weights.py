"""Two gloo ranks at O2: collectives on weights raise no version, and count all the same."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from small_training import backward, data, seeded
from torch.nn.parallel import DistributedDataParallel

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
    if not later:  # ranks begin with the same masters, not with the sender's FP32 and its rounding
        assert all(map(torch.equal, ours, theirs))
    for mine, other, value in zip(ours, theirs, sent, strict=True):
        if value.dtype is torch.float32:
            assert torch.equal(mine, value) and torch.equal(other, value)
        else:
            assert torch.equal(other.bfloat16(), value) and torch.equal(mine.bfloat16(), value)


def wrapping_after_the_optimizers_state(rank: int) -> list:
    """A checkpoint of the optimizer is loaded before DDP sends the weights."""
    model = seeded(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=torch.bfloat16, verbosity=0)
    optimizer.load_state_dict(optimizer.state_dict())
    model = DistributedDataParallel(model)
    backward(model, optimizer, data(rank))
    optimizer.zero_grad()
    optimizer.step()
    return [p.detach().clone() for p in ampatch.master_params(optimizer)]


def test_an_optimizers_state_loaded_before_ddp_rounds_no_master(ranks):
    for masters in ranks(wrapping_after_the_optimizers_state):
        assert all(map(torch.equal, masters, seeded(0).parameters()))


def adding_weights_later(rank: int) -> tuple[list, list]:
    """Masters before and after a step that changes none; others have joined between."""
    model, late = seeded(0), seeded(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize([model, late], optimizer, opt_level="O2", dtype=torch.bfloat16, verbosity=0)
    backward(model, optimizer, data())
    optimizer.step()
    before = [p.detach().clone() for p in ampatch.master_params(optimizer)]
    optimizer.add_param_group({"params": list(late.parameters())})
    optimizer.zero_grad()
    optimizer.step()
    return before, [p.detach().clone() for p in ampatch.master_params(optimizer)]


def test_weights_that_join_later_round_no_other_master(ranks):
    for before, after in ranks(adding_weights_later):
        assert all(map(torch.equal, before, after))  # as far as `before` goes
        assert not all(torch.equal(p, p.bfloat16().float()) for p in before)
