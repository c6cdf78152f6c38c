"""Outside of forwards O0 to O2 have FP32 weights, which the optimizer holds: what saves and shares
them does what it does in FP32 training.

The oracle's weights are plain FP32 parameters; at O2 its forwards get half copies of them.  All
numbers are compared bit by bit.  What reads, writes, copies and averages weights are situations.
"""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drivers import SGD, ByHand
from situations import Situation, batches, look, mlp, mse, plain_loop, trained
from small_training import step
from test_situations import check
from torch import Tensor, nn

import ampatch

needs_distributed = pytest.mark.skipif(
    not dist.is_available(), reason="torch without torch.distributed"
)


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
    first, second = ranks(hogwild, model)
    oracle = ByHand("O2", torch.float16)
    expected, optimizers = oracle.start(mlp(), [SGD, SGD], init_scale=64.0)
    seen = []
    for number, (x, y) in enumerate(batches(6)):
        oracle.step(mse(expected(x), y), optimizers[number % 2])
        seen += [outputs(expected), *(p.detach().clone() for p in expected.parameters())]
    assert all(map(torch.equal, first, second)) and all(map(torch.equal, first, seen))
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
