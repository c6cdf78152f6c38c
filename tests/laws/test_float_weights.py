"""Outside of forwards O0 to O2 have FP32 weights, which the optimizer holds: what reads, writes,
averages, copies, saves or shares them does what it does in FP32 training.

Each program runs under ampatch and under the oracle, whose weights are plain FP32 parameters; at O2
the oracle's forwards get half copies of them.  All numbers are compared bit by bit.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drivers import SGD, Ampatch, ByHand, Driver
from situations import Situation, batches, mlp, mse, plain_loop
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
ROWS: list[Any] = []


def program(run: Callable[[Any], None]) -> Callable[[Any], None]:
    """Add it to what runs at each level: at O2 with a scale, and without."""
    row = Situation(run, (), (), "", "by hand", 0.0, "", "", True)
    ROWS.extend(
        pytest.param(row, level, half, id=f"{row.name}-{level}-{half}") for level, half in CELLS
    )
    return run


def each(ways: dict[str, Any]) -> Callable:
    """A program for each of the ways."""

    def declare(run: Callable) -> Callable:
        for name, way in ways.items():
            one = partial(run, way=way)
            one.__name__ = f"{run.__name__}-{name.replace(' ', '_')}"  # type: ignore[attr-defined]
            program(one)
        return run

    return declare


@pytest.mark.parametrize(("row", "level", "half"), ROWS)
def test_program(row, level, half, caplog):
    check(row, level, half, caplog)


def outputs(amp: Any, model: nn.Module, seed: int = 9) -> Tensor:
    """Of an evaluation; a model that is not managed computes in FP32."""
    [(x, _)] = batches(1, seed)
    with torch.no_grad():
        return model(x)


def uncast_outputs(amp: Any, model: nn.Module) -> Tensor:
    """As `outputs`, of a model that was never given to `initialize`."""
    with amp.no_casts():
        return outputs(amp, model)


# Averages

D = 0.75  # of the old average


def in_data(mean: nn.Module, model: nn.Module) -> None:
    for m, p in zip(mean.parameters(), model.parameters(), strict=True):
        m.data.lerp_(p.data, 1 - D)


@torch.no_grad()
def by_one(write: Callable[[Tensor, Tensor], Any], mean: nn.Module, model: nn.Module) -> None:
    for m, p in zip(mean.parameters(), model.parameters(), strict=True):
        write(m, p)


@torch.no_grad()
def by_list(write: Callable[[list, list], Any], mean: nn.Module, model: nn.Module) -> None:
    write(list(mean.parameters()), list(model.parameters()))


def foreach_mul_add(means: list[Tensor], weights: list[Tensor]) -> None:
    torch._foreach_mul_(means, D)
    torch._foreach_add_(means, weights, alpha=1 - D)


AVERAGES = {
    "lerp_": partial(by_one, lambda m, p: m.lerp_(p, 1 - D)),
    "sub_": partial(by_one, lambda m, p: m.sub_((1 - D) * (m - p))),
    "mul_ add_": partial(by_one, lambda m, p: m.mul_(D).add_(p, alpha=1 - D)),
    "mul_ add_ data": partial(by_one, lambda m, p: m.data.mul_(D).add_(p.data, alpha=1 - D)),
    "copy_": partial(by_one, lambda m, p: m.copy_(D * m + (1 - D) * p)),
    "data lerp_": in_data,
    "foreach lerp_": partial(by_list, lambda ms, ps: torch._foreach_lerp_(ms, ps, 1 - D)),
    "foreach mul_ add_": partial(by_list, foreach_mul_add),
    "foreach sub_": partial(
        by_list, lambda ms, ps: torch._foreach_sub_(ms, torch._foreach_sub(ms, ps), alpha=1 - D)
    ),
}
COPIED = ("before initialize", "after initialize", "after a step")


def each_and_when(ways: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """All ways with one copy: they have its tensors.  The first one with copies of all times."""
    pairs = [(way, COPIED[1]) for way in ways] + [(next(iter(ways)), when) for when in COPIED]
    return {f"{way} {when}": (way, when) for way, when in pairs}


@each(each_and_when(AVERAGES))
def average_of(amp, way):
    """A deep copy that follows the weights; it computes in FP32, and goes into a checkpoint."""
    average, when = AVERAGES[way[0]], way[1]
    net = mlp(norm=True)
    mean = copy.deepcopy(net) if when == "before initialize" else None
    model, optimizer = amp.start(net)
    if when == "after a step":
        plain_loop(amp, model, optimizer, 1, seed=4)
    mean = copy.deepcopy(model) if mean is None else mean
    assert {p.dtype for p in mean.parameters()} == {torch.float32}
    for x, y in batches(4):
        amp.step(mse(model(x), y), optimizer)
        average(mean, model)
        amp.record(*mean.parameters())
    amp.record(uncast_outputs(amp, mean.eval()), *copy.deepcopy(mean).state_dict().values())


AVERAGED = {
    "mean": {},
    "mean of buffers": {"use_buffers": True},
    "avg_fn": {"avg_fn": get_ema_avg_fn(D)},
    "multi_avg_fn": {"multi_avg_fn": get_ema_multi_avg_fn(D), "use_buffers": True},
}


@each(each_and_when(AVERAGED))
def averaged_model(amp, way):
    """torch's own SWA and EMA, with a schedule, copies, a checkpoint and `update_bn`."""
    options, when = AVERAGED[way[0]], way[1]
    net = mlp(norm=True)
    mean = AveragedModel(net, **options) if when == "before initialize" else None
    model, optimizer = amp.start(net)
    if when == "after a step":
        plain_loop(amp, model, optimizer, 1, seed=4)
    mean = AveragedModel(model, **options) if mean is None else mean
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for x, y in batches(4):
        amp.step(mse(model(x), y), optimizer)
        mean.update_parameters(model)
        schedule.step()
    assert int(mean.n_averaged) == 4
    amp.record(*mean.state_dict().values())
    again = AveragedModel(mlp(7, norm=True), **options)
    again.load_state_dict(copy.deepcopy(mean).state_dict())
    with amp.no_casts():
        update_bn(batches(3, seed=5), again)
    amp.record(*again.state_dict().values(), uncast_outputs(amp, again.eval()))


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


@each({"data": swap_by_data, "copy_": swap_by_copy, "load_state_dict": swap_by_loading})
def average_swapped_in_and_back(amp, way):
    """The half forward has the average meanwhile, and what trained before goes on."""
    model, optimizer = amp.start(mlp())
    mean = [p.detach().clone() for p in model.parameters()]
    for x, y in batches(4):
        amp.step(mse(model(x), y), optimizer)
        torch._foreach_lerp_(mean, [p.detach() for p in model.parameters()], 1 - D)
        kept = [p.detach().clone() for p in model.parameters()]
        way(model, [value.clone() for value in mean])
        amp.record(outputs(amp, model))
        way(model, kept)
        amp.record(outputs(amp, model))


# Writes and reads


def numpy_through_data(p: Tensor) -> None:
    p.data.numpy()[...] *= 0.5


def numpy_through_detach(p: Tensor) -> None:
    p.detach().numpy()[...] += 0.25


def repaired(p: Tensor) -> None:
    p.data[:1] = torch.nan
    p.data.nan_to_num_(0.1)


def all_of(write: Callable[[Tensor], None]) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        for p in model.parameters():
            write(p)

    return change


WRITES = {
    "numpy through data": all_of(numpy_through_data),
    "numpy through detach": all_of(numpy_through_detach),
    "weight decay by hand": all_of(lambda p: p.data.mul_(1 - 0.1 * 0.01)),
    "nan_to_num_": all_of(repaired),
}


@each({f"{name} {when}": (write, when) for name, write in WRITES.items() for when in ("", "graph")})
def write(amp, way):
    """Between steps, or while a graph waits for its backward pass."""
    change, when = way
    model, optimizer = amp.start(mlp(), torch.optim.Adam)
    for x, y in batches(3):
        optimizer.zero_grad()
        loss = mse(model(x), y)
        if not when:
            amp.backward(loss, optimizer)
            optimizer.step()
        change(model)
        amp.record(outputs(amp, model), *model.parameters())
        if when:
            amp.backward(loss, optimizer)
            optimizer.step()


@program
def a_learning_rate_finder(amp):
    """Keeps everything, lets the rate grow by factors until the loss explodes, goes back."""
    model, optimizer = amp.start(mlp(norm=True))
    plain_loop(amp, model, optimizer, 2)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 3.0)
    for x, y in batches(6):
        amp.step(mse(model(x), y), optimizer)
        schedule.step()
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    assert optimizer.param_groups[0]["lr"] == 0.1
    amp.record(*model.state_dict().values())
    plain_loop(amp, model, optimizer, 2, seed=3)


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
    model, optimizer = amp.start(net, ByAttributes)
    plain_loop(amp, model, optimizer, 2)
    for p in model.parameters():
        p.lr_mult *= 2
    plain_loop(amp, model, optimizer, 2)
    amp.record(*(optimizer.state[p]["seen"] for p in model.parameters()))
    copied = copy.deepcopy(model)
    amp.record(*(getattr(p, "lr_mult", 0.0) for p in model.parameters()), *copied.parameters())


@program
def state_by_the_models_parameters(amp):
    """Momentum is damped, read and forgotten through `optimizer.state[p]`."""
    model, optimizer = amp.start(mlp())
    for x, y in batches(4):
        amp.step(mse(model(x), y), optimizer)
        for p in model.parameters():
            amp.record(optimizer.state[p]["momentum_buffer"])
            optimizer.state[p]["momentum_buffer"].mul_(0.5)
    optimizer.state.pop(model[0].weight)
    plain_loop(amp, model, optimizer, 2)


@program
def sam_through_the_models_parameters(amp):
    """Sharpness-aware steps whose ascent is kept in the optimizer's state."""
    model, optimizer = amp.start(mlp())
    for x, y in batches(4):
        optimizer.zero_grad()
        amp.backward(mse(model(x), y), optimizer)
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        with torch.no_grad():
            for p in model.parameters():
                optimizer.state[p]["up"] = up = p.grad * (0.3 / norm)
                p.add_(up)
        optimizer.zero_grad()
        amp.backward(mse(model(x), y), optimizer)
        for p in model.parameters():
            p.data.sub_(optimizer.state[p].pop("up"))
        optimizer.step()


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


@program
def parts_frozen_in_turn(amp):
    """With an evaluation between; a frozen part keeps its bits."""
    model, optimizer = amp.start(mlp(), partial(torch.optim.AdamW, lr=0.01))
    for number, (x, y) in enumerate(batches(6)):
        for index, layer in enumerate((model[0], model[2])):
            layer.requires_grad_(index == number % 2)
        optimizer.zero_grad(set_to_none=True)
        amp.step(mse(model(x), y), optimizer)
        amp.record(outputs(amp, model), *model.parameters())


# Optimizers that were not given


@program
def an_optimizer_that_was_not_given(amp):
    """Made after `initialize`, beside one that was given: it steps on the same weights."""
    model, given = amp.start(mlp(), loss_scale=1.0)
    own = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in batches(4):
        own.zero_grad()
        amp.record(loss := mse(model(x), y))
        loss.backward()
        own.step()
        amp.record(*model.parameters())
        plain_loop(amp, model, given, 1, seed=8)


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
        optimizer.zero_grad()
        with ampatch.scale_loss(mse(model(x), y), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), expected.parameters()))


# Copies and checkpoints


def through_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def through_a_file(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


THROUGH = {"deepcopy": copy.deepcopy, "pickle": through_pickle, "torch.save": through_a_file}


@pytest.mark.parametrize("how", THROUGH)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_model_and_its_optimizer_apart_and_together(level, how):
    """What comes back is plain FP32; together, the optimizer holds the model's parameters."""
    driver = Ampatch(level, torch.float16)
    model, optimizer = driver.start(mlp(), partial(torch.optim.AdamW, lr=0.01))
    plain_loop(driver, model, optimizer, 3)
    alone, own = THROUGH[how](model), THROUGH[how](optimizer)
    first, second = THROUGH[how]((model, optimizer))
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

    model, optimizer = amp.start(mlp(), partial(torch.optim.AdamW, lr=0.01))
    if way == "held from before":
        plain_loop(amp, model, optimizer, 1)  # makes the optimizer's state
    else:
        plain_loop(amp, model, optimizer, 3)
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
    amp.record(outputs(amp, model), *model.parameters())
    plain_loop(amp, model, optimizer, 2, seed=4)


@needs_distributed
@pytest.mark.filterwarnings("ignore:torch.distributed is .*single process")
@pytest.mark.parametrize("way", ["held from before", "held from after"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_distributed_checkpoints_held_in_a_local(level, way, tmp_path, caplog):
    """They alias the weights: they show later steps, and a load into them reaches the forward."""

    def run(amp: Any) -> None:
        checkpointed(amp, way, str(tmp_path / type(amp).__name__))

    check(Situation(run, (), (), "", "by hand", 0.0, "", "", True), level, "fp16", caplog)


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


def local_steps(rank: int, name: str, level: str, half: torch.dtype, ours: bool) -> list[Tensor]:
    """Each rank steps on data of its own; every other step their weights become one."""
    amp: Driver = (Ampatch if ours else ByHand)(level, half)
    model, optimizer = amp.start(mlp())
    for number, (x, y) in enumerate(batches(4, seed=rank)):
        amp.step(mse(model(x), y), optimizer)
        if number % 2:
            COLLECTIVES[name](model)
        amp.record(outputs(amp, model))
    return amp.seen + amp.weights()


@needs_distributed
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_collectives_on_weights(ranks, level, name):
    """Local SGD, and ranks made equal by hand: collectives write without a version."""
    found = ranks(local_steps, name, level, torch.bfloat16, True)
    expected = ranks(local_steps, name, level, torch.bfloat16, False)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert all(map(torch.equal, found[0][-4:], found[1][-4:]))


def hogwild(rank: int, model: nn.Module) -> list[Tensor]:
    """The ranks step in turn on one shared model; each looks at it in each turn."""
    optimizer = SGD(model.parameters())
    plain, seen = copy.copy(model), []
    plain._modules = dict(model._modules)
    ampatch.initialize(model, optimizer, opt_level="O2", init_scale=64.0, verbosity=0)
    for number, (x, y) in enumerate(batches(6)):
        if number % 2 == rank:
            optimizer.zero_grad()
            with ampatch.scale_loss(mse(model(x), y), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        dist.barrier()
        seen += [outputs(None, model), *(p.detach().clone() for p in model.parameters())]
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
        seen += [outputs(oracle, expected), *(p.detach().clone() for p in expected.parameters())]
    assert all(map(torch.equal, one, two)) and all(map(torch.equal, one, seen))
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
