"""Situations: averages of the weights, kept by torch."""

import copy

from situations import batches, look, mlp, plain_loop, situation
from torch import nn
from torch.optim.swa_utils import (
    SWALR,
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    update_bn,
)

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
