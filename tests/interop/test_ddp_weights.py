"""Two gloo ranks: wrapping in DistributedDataParallel rounds no weight."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from ddp_training import backward, build
from torch.nn.parallel import DistributedDataParallel

import ampatch as amp

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


WAYS = ["built", "loaded", "loaded by one"]


def copies(values):
    return [value.detach().clone() for value in values]


def wrapping(rank: int, ways: list[str], is_late: bool) -> dict:
    """The weights then, and after steps on data of each rank's own; `is_late`: the optimizer."""
    found = {}
    checkpoint = build(seed=7)[0].state_dict()
    for name in ways:
        model, optimizer = build(seed=rank)
        given = [] if is_late else [optimizer]
        amp.initialize(model, given, opt_level="O2", dtype=torch.bfloat16, verbosity=0)
        if name == "loaded" or (name == "loaded by one" and rank == 0):
            model.load_state_dict(checkpoint)
        if name == "trained":
            backward(model, optimizer, rank)
            optimizer.step()
            optimizer.state.clear()  # momentum that no DDP shares
        parallel = DistributedDataParallel(model)
        if is_late:
            amp.add_optimizers(optimizer)
        found[name] = copies(model.state_dict().values())
        for step in range(3):
            optimizer.zero_grad()
            backward(parallel, optimizer, 10 * rank + step)
            optimizer.step()
        found[name + ", later"] = copies([*amp.master_params(optimizer), *model.parameters()])
        amp.deactivate()
    return found


def test_weights_are_those_of_rank_0_in_float32(ranks):
    one, two = ranks(wrapping, [*WAYS, "trained"], False)
    for name in one:
        assert all(map(torch.equal, one[name], two[name])), name
    fresh, checkpoint = (list(build(seed)[0].state_dict().values()) for seed in (0, 7))
    assert all(map(torch.equal, one["built"], fresh))
    assert all(map(torch.equal, one["loaded"], checkpoint))
    assert all(map(torch.equal, one["loaded by one"], checkpoint))
    assert not any(torch.equal(value, value.bfloat16().float()) for value in one["trained"])


def test_the_optimizer_may_come_after_the_wrapper(ranks):
    expected, found = ranks(wrapping, WAYS, False), ranks(wrapping, WAYS, True)
    for of_rank, of_rank_now in zip(expected, found, strict=True):
        for name, values in of_rank.items():
            assert all(map(torch.equal, of_rank_now[name], values)), name


def test_the_constructor_keeps_its_signature_and_is_given_back():
    before = DistributedDataParallel.__init__
    model, optimizer = build(seed=0)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert DistributedDataParallel.__init__ is not before
    assert inspect.signature(DistributedDataParallel.__init__) == inspect.signature(before)
    amp.deactivate()
    assert DistributedDataParallel.__init__ is before
