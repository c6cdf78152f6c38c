"""Outside of forwards O0 to O2 have FP32 weights, which the optimizer holds: what copies, saves and
shares them does what it does in FP32 training.

The oracle's weights are plain FP32 parameters; at O2 its forwards get half copies of them.  All
numbers are compared bit by bit.  What reads, writes and averages weights are situations.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drivers import SGD, Ampatch, ByHand, Driver
from situations import Situation, batches, look, mlp, mse, plain_loop, trained
from small_training import step
from test_situations import check
from torch import Tensor, nn

import ampatch
from ampatch.errors import AmpatchError

needs_distributed = pytest.mark.skipif(
    not dist.is_available(), reason="torch without torch.distributed"
)


def test_a_scale_for_an_optimizer_that_was_not_given(half):
    """Only managed optimizers unscale; the cure is one call, also in the middle."""
    model = mlp()
    ampatch.initialize(model, opt_level="O2", dtype=half, init_scale=64.0, verbosity=0)
    optimizer = SGD(model.parameters())
    [(x, y)] = batches(1)
    with pytest.raises(AmpatchError, match=r"not given to ampatch.*add_optimizers"):
        ampatch.scale_loss(mse(model(x), y), optimizer).__enter__()
    ampatch.add_optimizers(optimizer)
    oracle = ByHand("O2", half)
    expected, reference = oracle.start(mlp(), init_scale=64.0)
    plain_loop(oracle, expected, reference, 3)
    for x, y in batches(3):
        step(mse(model(x), y), optimizer)
    assert all(map(torch.equal, model.parameters(), expected.parameters()))


# Checkpoints


def checkpointed(amp: Any, way: str, folder: str) -> None:
    """A state dict of torch.distributed.checkpoint that is held while training goes on."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    before = 1 if way == "held from before" else 3  # the first step makes the optimizer's state
    model, optimizer = trained(amp, mlp(), partial(torch.optim.AdamW, lr=0.01), before)
    weights, state = get_state_dict(model, optimizer)
    held = {"model": weights, "optimizer": state}
    if way == "held from before":
        plain_loop(amp, model, optimizer, 2, seed=2)
    dcp.save(held, checkpoint_id=folder)
    amp.record(*weights.values())
    plain_loop(amp, model, optimizer, 2, seed=3)
    dcp.load(held, checkpoint_id=folder)
    amp.record(*weights.values(), *model.parameters())
    set_state_dict(
        model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"]
    )
    look(amp, model)
    amp.record(*model.parameters())
    plain_loop(amp, model, optimizer, 2, seed=4)


@needs_distributed
@pytest.mark.filterwarnings("ignore:torch.distributed is .*single process")
@pytest.mark.parametrize("way", ["held from before", "held from after"])
def test_distributed_checkpoints_held_in_a_local(way, tmp_path, caplog):
    """They alias the weights: they show later steps, and a load into them reaches the forward."""

    def run(amp: Any) -> None:
        checkpointed(amp, way, str(tmp_path / type(amp).__name__))

    check(Situation(run, way), "O2", "fp16", caplog)


# Several processes


def all_reduced(model: nn.Module) -> None:
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data.div_(2)


def broadcast(model: nn.Module) -> None:
    for p in model.parameters():
        dist.broadcast(p.detach(), src=1)


def coalesced(model: nn.Module) -> None:
    flat = torch._utils._flatten_dense_tensors([p.data for p in model.parameters()])
    dist.all_reduce(flat)
    parts = torch._utils._unflatten_dense_tensors(flat / 2, [p.data for p in model.parameters()])
    for p, part in zip(model.parameters(), parts, strict=True):
        p.data.copy_(part)


def gathered(model: nn.Module) -> None:
    for p in model.parameters():
        both = [torch.empty_like(p) for _ in range(2)]
        dist.all_gather(both, p.detach())
        with torch.no_grad():
            p.copy_((both[0] + both[1]) / 2)


COLLECTIVES = {
    "all_reduce": all_reduced,
    "broadcast": broadcast,
    "one buffer": coalesced,
    "all_gather": gathered,
}


def local_steps(rank: int, level: str, ours: bool) -> list[Tensor]:
    """Each rank steps on data of its own; every other step their weights become one."""
    amp: Driver = (Ampatch if ours else ByHand)(level, torch.bfloat16)
    model, optimizer = amp.start(mlp())
    for number, collective in enumerate(COLLECTIVES.values()):
        for seed in (2 * rank, 2 * rank + 1):
            plain_loop(amp, model, optimizer, 1, seed + 4 * number)
            if seed % 2:
                collective(model)
            look(amp, model)
    return amp.seen + amp.weights()


@needs_distributed
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_collectives_on_weights(ranks, level):
    """Local SGD, and ranks made equal by hand: collectives write without a version."""
    found, expected = ranks(local_steps, level, True), ranks(local_steps, level, False)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert all(map(torch.equal, found[0][-4:], found[1][-4:]))


@torch.no_grad()
def outputs(model: nn.Module) -> Tensor:
    return model(next(batches(1))[0])


def hogwild(rank: int, model: nn.Module) -> list[Tensor]:
    """The ranks step in turn on one shared model; each looks at it in each turn."""
    optimizer = SGD(model.parameters())
    plain, seen = copy.copy(model), []
    plain._modules = dict(model._modules)
    ampatch.initialize(model, optimizer, opt_level="O2", init_scale=64.0, verbosity=0)
    for number, (x, y) in enumerate(batches(6)):
        if number % 2 == rank:
            step(mse(model(x), y), optimizer)
        dist.barrier()
        seen += [outputs(model), *(p.detach().clone() for p in model.parameters())]
        dist.barrier()
    return seen


@needs_distributed
def test_a_shared_model_that_several_processes_train_and_evaluate(ranks):
    """Hogwild: each sees at once what the other writes, in its half forwards too."""
    model = mlp().share_memory()
    one, two = ranks(hogwild, model)
    oracle = ByHand("O2", torch.float16)
    expected, optimizers = oracle.start(mlp(), [SGD, SGD], init_scale=64.0)
    seen = []
    for number, (x, y) in enumerate(batches(6)):
        oracle.step(mse(expected(x), y), optimizers[number % 2])
        seen += [outputs(expected), *(p.detach().clone() for p in expected.parameters())]
    assert all(map(torch.equal, one, two)) and all(map(torch.equal, one, seen))
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
