"""Outside of forwards O0 to O2 have FP32 weights, which the optimizer holds: what reads, writes,
averages, copies, saves or shares them does what it does in FP32 training.

Each program runs under ampatch and under the oracle, whose weights are plain FP32 parameters; at O2
the oracle's forwards get half copies of them.  All numbers are compared bit by bit.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drivers import SGD, Ampatch, ByHand, Driver
from situations import Situation, batches, each, look, mlp, mse, plain_loop, trained
from situations_saved import through_a_file
from small_training import step
from test_situations import check
from torch import Tensor, nn
from torch.optim.swa_utils import (
    SWALR,
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    update_bn,
)

import ampatch
from ampatch.errors import AmpatchError

CELLS = [("O0", "bf16"), ("O1", "fp16"), ("O2", "fp16"), ("O2", "bf16")]
needs_distributed = pytest.mark.skipif(
    not dist.is_available(), reason="torch without torch.distributed"
)
PROGRAMS: list[Situation] = []


def program(run: Callable[[Any], None]) -> Callable[[Any], None]:
    """Add it to what runs at each level: at O2 with a scale, and without."""
    PROGRAMS.append(Situation(run, run.__name__))
    return run


def uncast_outputs(amp: Any, model: nn.Module) -> None:
    """Record an evaluation of a model that was never given to `initialize`."""
    with amp.no_casts():
        look(amp, model.eval())


# Averages

D = 0.75  # of the old average


def in_data(means: list[Tensor], weights: list[Tensor]) -> None:
    for mean, weight in zip(means, weights, strict=True):
        mean.data.lerp_(weight.data, 1 - D)


@torch.no_grad()
def one_by_one(means: list[Tensor], weights: list[Tensor]) -> None:
    for mean, weight in zip(means, weights, strict=True):
        mean.mul_(D).add_(weight, alpha=1 - D)


AVERAGES = {
    "data": in_data,
    "one by one": one_by_one,
    "lists": torch.no_grad()(partial(torch._foreach_lerp_, weight=1 - D)),
}


@program
def averages(amp):
    """Deep copies from before `initialize`, from after it and from after a step that follow the
    weights; they compute in FP32, and go into a checkpoint."""
    net = mlp(norm=True)
    means = [("lists", copy.deepcopy(net))]
    model, optimizer = amp.start(net)
    means += [(name, copy.deepcopy(model)) for name in AVERAGES]
    plain_loop(amp, model, optimizer, 1, seed=4)
    means += [(name, copy.deepcopy(model)) for name in AVERAGES]
    for _ in range(3):
        plain_loop(amp, model, optimizer, 1)
        for name, mean in means:
            AVERAGES[name](list(mean.parameters()), list(model.parameters()))
            amp.record(*mean.parameters())
    for name, mean in means:
        amp.case = name
        assert {p.dtype for p in mean.parameters()} == {torch.float32}
        uncast_outputs(amp, mean)
        amp.record(*copy.deepcopy(mean).state_dict().values())


AVERAGED = {
    "mean": {},
    "mean of buffers": {"use_buffers": True},
    "avg_fn": {"avg_fn": get_ema_avg_fn(D)},
    "multi_avg_fn": {"multi_avg_fn": get_ema_multi_avg_fn(D), "use_buffers": True},
}


@program
def averaged_models(amp):
    """torch's own SWA and EMA, with a schedule, copies, a checkpoint and `update_bn`."""
    net = mlp(norm=True)
    means = [("mean", AveragedModel(net))]
    model, optimizer = amp.start(net)
    means += [(name, AveragedModel(model, **options)) for name, options in AVERAGED.items()]
    plain_loop(amp, model, optimizer, 1, seed=4)
    means += [("mean", AveragedModel(model))]
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for _ in range(4):
        plain_loop(amp, model, optimizer, 1)
        for _, mean in means:
            mean.update_parameters(model)
        schedule.step()
    for name, mean in means:
        amp.case = name
        assert int(mean.n_averaged) == 4
        amp.record(*mean.state_dict().values())
        again = AveragedModel(mlp(7, norm=True), **AVERAGED[name])
        again.load_state_dict(copy.deepcopy(mean).state_dict())
        with amp.no_casts():
            update_bn(batches(3, seed=5), again)
        amp.record(*again.state_dict().values())
        uncast_outputs(amp, again)


def swap_by_data(model, values):
    for p, value in zip(model.parameters(), values, strict=True):
        p.data = value


def swap_by_copy(model, values):
    with torch.no_grad():
        for p, value in zip(model.parameters(), values, strict=True):
            p.copy_(value)


def swap_by_loading(model, values):
    names = [name for name, _ in model.named_parameters()]
    model.load_state_dict(dict(zip(names, values, strict=True)), strict=False)


SWAPS = {"data": swap_by_data, "copy_": swap_by_copy, "load_state_dict": swap_by_loading}


@program
def an_average_swapped_in_and_back(amp):
    """The half forward has the average meanwhile, and what trained before goes on."""
    model, optimizer = amp.start(mlp())
    mean = [p.detach().clone() for p in model.parameters()]
    for swap in each(amp, SWAPS):
        for _ in range(3):
            plain_loop(amp, model, optimizer, 1)
            torch._foreach_lerp_(mean, [p.detach() for p in model.parameters()], 1 - D)
            kept = [p.detach().clone() for p in model.parameters()]
            swap(model, [value.clone() for value in mean])
            look(amp, model)
            swap(model, kept)
            look(amp, model)


# Writes and reads


def through_numpy(p: Tensor) -> None:
    p.data.numpy()[...] *= 0.5
    p.detach().numpy()[...] += 0.25


def repaired(p: Tensor) -> None:
    p.data[:1] = torch.nan
    p.data.nan_to_num_(0.1)


WRITES = {
    "numpy": through_numpy,
    "weight decay by hand": lambda p: p.data.mul_(1 - 0.1 * 0.01),
    "nan_to_num_": repaired,
}


@program
def writes(amp):
    """Between steps, and while a graph waits for its backward pass."""
    model, optimizer = amp.start(mlp(), torch.optim.Adam)
    for write in each(amp, WRITES):
        for x, y in batches(2):
            loss = mse(model(x), y)
            for p in model.parameters():
                write(p)
            look(amp, model)
            amp.record(*model.parameters())
            amp.step(loss, optimizer)
            for p in model.parameters():
                write(p)
            look(amp, model)
            amp.step(mse(model(x), y), optimizer)


class ByAttributes(torch.optim.Optimizer):
    """Reads what the model's maker has noted on each parameter; keeps its state by parameter."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["seen"] = state.get("seen", 0) + 1
                    p.add_(p.grad, alpha=-group["lr"] * p.lr_mult / state["seen"])


@program
def attributes_on_parameters(amp):
    """`p.lr_mult`, as muP's and detection frameworks' optimizers read it."""
    net = mlp()
    for number, p in enumerate(net.parameters()):
        p.lr_mult = 1.0 / (1 + number)
    model, optimizer = trained(amp, net, ByAttributes, 2)
    for p in model.parameters():
        p.lr_mult *= 2
    plain_loop(amp, model, optimizer, 2)
    amp.record(*(optimizer.state[p]["seen"] for p in model.parameters()))
    copied = copy.deepcopy(model)
    amp.record(*(getattr(p, "lr_mult", 0.0) for p in model.parameters()), *copied.parameters())


@program
def state_by_the_models_parameters(amp):
    """Momentum is damped, read and forgotten through `optimizer.state[p]`, which keeps what a
    sharpness-aware step has ascended by."""
    model, optimizer = trained(amp, count=1)
    for x, y in batches(4):
        amp.step(mse(model(x), y), optimizer)
        with torch.no_grad():
            for p in model.parameters():
                optimizer.state[p]["up"] = up = p.grad * 0.3
                p.add_(up)
        optimizer.zero_grad()
        amp.backward(mse(model(x), y), optimizer)
        for p in model.parameters():
            p.data.sub_(optimizer.state[p].pop("up"))
            amp.record(optimizer.state[p]["momentum_buffer"])
            optimizer.state[p]["momentum_buffer"].mul_(0.5)
        optimizer.step()
    optimizer.state.pop(model[0].weight)
    plain_loop(amp, model, optimizer, 2)


@program
def hooks_on_parameters(amp):
    """Of the gradient, which they change, and of its accumulation, which they watch."""
    model, optimizer = amp.start(mlp(), loss_scale=64.0)
    order, dtypes = [], set()
    names = {id(p): number for number, p in enumerate(model.parameters())}

    def accumulated(p):
        order.append(names[id(p)])
        dtypes.add(p.grad.dtype)

    for p in model.parameters():
        p.register_hook(lambda grad: grad * 0.5)
        p.register_post_accumulate_grad_hook(accumulated)
    plain_loop(amp, model, optimizer, 3)
    assert dtypes == {torch.float32} and sorted(order) == sorted([0, 1, 2, 3] * 3)


# Optimizers that were not given


@program
def an_optimizer_that_was_not_given(amp):
    """Made after `initialize`, beside one that was given: it steps on the same weights."""
    model, given = amp.start(mlp(), loss_scale=1.0)
    own = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in batches(4):
        own.zero_grad()
        amp.plain_backward(mse(model(x), y))
        own.step()
        amp.record(*model.parameters())
        plain_loop(amp, model, given, 1, seed=8)


@pytest.mark.parametrize(("level", "half"), CELLS)
@pytest.mark.parametrize("row", PROGRAMS, ids=lambda row: row.name)
def test_program(row, level, half, caplog):
    check(row, level, half, caplog)


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


# Copies and checkpoints


THROUGH = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "torch.save": through_a_file,
}


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_model_and_its_optimizer_apart_and_together(level):
    """What comes back is plain FP32; together, the optimizer holds the model's parameters."""
    driver = Ampatch(level, torch.float16)
    model, optimizer = trained(driver, mlp(), partial(torch.optim.AdamW, lr=0.01))
    for through in THROUGH.values():
        alone, own = through(model), through(optimizer)
        first, second = through((model, optimizer))
        assert second.param_groups[0]["params"][0] is first[0].weight
        for made in (alone, first):
            assert type(made) is nn.Sequential and not made._forward_hooks
            assert all(map(torch.equal, made.parameters(), model.parameters()))
        for made in (own, second):
            assert type(made) is torch.optim.AdamW and "step" not in vars(made)
            params = made.param_groups[0]["params"]
            assert all(map(torch.equal, params, model.parameters()))
            for ours, theirs in zip(params, model.parameters(), strict=True):
                for key, value in optimizer.state[theirs].items():
                    assert torch.equal(made.state[ours][key], value), key


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
