"""Situations: averages of the weights, kept by hand and by torch, and stepped from."""

import copy
from functools import partial

import torch
from situations import batches, look, mlp, mse, plain_loop, situation
from torch import Tensor, nn
from torch.optim.swa_utils import (
    SWALR,
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    update_bn,
)

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


def uncast_outputs(amp, model):
    """Record an evaluation of a model that was never given to `initialize`."""
    with amp.no_casts():
        look(amp, model.eval())


@situation("O0 O1 O2")
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


@situation("O0 O1 O2")
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


@situation("O1 O2")
def averaged_submodule(amp):
    """In bfloat16 the average would stand still."""
    model, optimizer = amp.start(nn.Sequential(mlp(), nn.Linear(2, 2)))
    mean = AveragedModel(model[0], multi_avg_fn=get_ema_multi_avg_fn(0.999))
    plain_loop(amp, model, optimizer, 4, after=lambda: mean.update_parameters(model[0]))
    amp.record(*mean.module.state_dict().values())


@situation("O1 O2")
def schedule_free_modes(amp):
    """`eval()` and `train()` of the optimizer move its parameters between two points."""

    class ScheduleFree(torch.optim.SGD):
        @torch.no_grad()
        def eval(self):
            for p in self.param_groups[0]["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, 0.5)

        @torch.no_grad()
        def train(self):
            for p in self.param_groups[0]["params"]:
                p.lerp_(self.state[p]["z"], -1.0)

    model, optimizer = amp.start(mlp(), partial(ScheduleFree, lr=0.1))
    for x, y in batches(4):
        amp.step(mse(model(x), y), optimizer)
        optimizer.eval()
        look(amp, model, x)
        optimizer.train()
