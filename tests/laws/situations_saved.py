"""Situations: state dicts, checkpoints, copies of a model with its optimizer; averages by torch."""

import copy
import io
import pickle

import torch
from situations import batches, look, mlp, mse, plain_loop, situation, trained
from torch import nn
from torch.optim.swa_utils import (
    SWALR,
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    update_bn,
)


@situation("O1 O2")
def state_dicts_that_are_kept(amp):
    """`state_dict` aliases the weights, as PyTorch's does: writes into it (Polyak averaging) reach
    the next forward, and one from the start shows later steps."""
    model, optimizer = amp.start(mlp())
    kept = model.state_dict()
    target = {key: value.clone() for key, value in kept.items()}
    for x, y in batches(4):
        for key, value in model.state_dict().items():
            value.copy_(0.5 * value + 0.5 * target[key])
        look(amp, model, x)
        amp.step(mse(model(x), y), optimizer)
        amp.record(*kept.values())
        kept["0.weight"].mul_(0.5)
        look(amp, model, x)


def through_a_file(pair):
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


THROUGH = {
    "deepcopied": copy.deepcopy,
    "saved": through_a_file,
    "pickled_optimizer_first": lambda pair: pickle.loads(pickle.dumps(pair[::-1]))[::-1],
}


@situation("O1 O2", cases=THROUGH, changes_weights=False)
def a_pair_trains(amp, case):
    """The copy is plain FP32; it goes on from there, and the first stays where it is."""
    pair = trained(amp, count=2)
    model, optimizer = amp.pair(*pair) if amp.by_hand else case(pair)
    with amp.no_casts():
        for x, y in batches(3):
            optimizer.zero_grad()
            amp.plain_backward(mse(model(x), y))
            optimizer.step()
    amp.record(*model.parameters())


AVERAGED = {
    "mean": {},
    "mean of buffers": {"use_buffers": True},
    "avg_fn": {"avg_fn": get_ema_avg_fn(0.75)},
    "multi_avg_fn": {"multi_avg_fn": get_ema_multi_avg_fn(0.75), "use_buffers": True},
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
        with amp.no_casts():  # it was never given to `initialize`
            update_bn(batches(3, seed=5), again)
            look(amp, again.eval())
        amp.record(*again.state_dict().values())


@situation("O1 O2")
def averaged_submodule(amp):
    """In bfloat16 the average would stand still."""
    model, optimizer = amp.start(nn.Sequential(mlp(), nn.Linear(2, 2)))
    mean = AveragedModel(model[0], multi_avg_fn=get_ema_multi_avg_fn(0.999))
    plain_loop(amp, model, optimizer, 4, after=lambda: mean.update_parameters(model[0]))
    amp.record(*mean.module.state_dict().values())
