"""Situations: parameters that are frozen, shared, reparametrized, averaged, added and replaced."""

import copy

import torch
from drivers import SGD
from situations import batches, each, mlp, mse, plain_loop, situation, trained
from torch import nn
from torch.nn.utils import parametrizations, prune


@situation()
def tied_weights(amp):
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    net[2].weight = net[0].weight
    trained(amp, net, count=4)


def one_model_and_two_optimizers():
    model = mlp()
    return [model, model], [SGD(model[0].parameters()), SGD(model[2].parameters())]


def two_models_and_one_optimizer():
    models = [mlp(0), mlp(1)]
    return models, [SGD(nn.ModuleList(models).parameters())] * 2


def a_layer(optimizer_too=False):
    first, second = mlp(0), mlp(1)
    second[0] = first[0]
    of_both = [SGD(nn.ModuleList([first, second]).parameters())] * 2
    return [first, second], (
        of_both if optimizer_too else [SGD(first.parameters()), SGD(second[2].parameters())]
    )


def a_model_in_another():
    inner, last = mlp(), nn.Linear(2, 2)
    models = [inner, nn.Sequential(inner, nn.Tanh(), last)]
    return models, [SGD(inner.parameters()), SGD(last.parameters())]


SHARED = {
    "one_model": one_model_and_two_optimizers,
    "one_optimizer": two_models_and_one_optimizer,
    "a_layer": a_layer,
    "a_layer_and_an_optimizer": lambda: a_layer(optimizer_too=True),
    "a_model_in_another": a_model_in_another,
}


@situation("O1 O2", cases=SHARED, halves="bf16", against="FP32", within=2e-2)
def two_calls_share(amp, case):
    """Of `initialize`, in both orders and once more.  If a weight were two: 0.2 away."""
    for order in ((1, 0), (0, 1, 0, 1)):
        models, optimizers = case()
        before = [param for model in models for param in model.parameters()]
        drivers = amp, amp.another()
        for index in order:
            drivers[index].start(models[index], optimizers[index], loss_scale=1.0)
        for x, y in batches(3):
            for driver, model, optimizer in zip(drivers, models, optimizers):
                driver.step(mse(model(x), y), optimizer)
        after = [param for model in models for param in model.parameters()]
        assert all(a is b and a.dtype is torch.float32 for a, b in zip(before, after, strict=True))


CLOSE_TO_FP32 = {"within": 1e-2, "against": "FP32", "halves": "fp16"}


@situation("O1 O2", cases={"weight_norm": parametrizations.weight_norm}, **CLOSE_TO_FP32)
@situation("O1", cases={"spectral_norm": parametrizations.spectral_norm}, **CLOSE_TO_FP32)
def reparametrized(amp, case):
    """Against FP32: a weight that stood still would be 0.2 away."""
    net = mlp()
    case(net[0])
    trained(amp, net, count=4)


@situation("O1 O2")
def pruning(amp):
    model, optimizer = trained(amp, count=2)
    mask = (torch.arange(32).view(8, 4) % 3 > 0).float()
    prune.custom_from_mask(model[0], "weight", mask.to(model[0].weight.dtype))
    plain_loop(amp, model, optimizer, 3)


@situation("O1")
def parameters_that_are_swapped_on_conversion(amp):
    """By a conversion between steps, and by what is loaded."""
    was = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model, optimizer = amp.start(mlp())
        plain_loop(amp, model, optimizer, 2)
        optimizer.zero_grad()
        model.to(amp.device)
        plain_loop(amp, model, optimizer, 2)
        model.load_state_dict(mlp(3).state_dict())
        plain_loop(amp, model, optimizer, 2)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(was)


@torch.no_grad()
def with_a_new_head(amp, model, optimizer):
    model[-1].weight.zero_()
    model[-1].bias.zero_()


def with_a_layer_reset(amp, model, optimizer):
    torch.manual_seed(3)
    model[-1].reset_parameters()


def gone_back_to_the_best(amp, model, optimizer):
    best = {key: value.clone() for key, value in model.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    plain_loop(amp, model, optimizer, 1)
    model.load_state_dict(best)
    plain_loop(amp, model, optimizer, 1)
    optimizer.load_state_dict(state)


BETWEEN = {
    "a new head": with_a_new_head,
    "a layer reset": with_a_layer_reset,
    "back to the best weights": gone_back_to_the_best,
    "momentum forgotten": lambda amp, model, optimizer: optimizer.state.clear(),
    "to the device it is on": lambda amp, model, optimizer: model.to(amp.device),
}


@situation()
def changed_between_steps(amp):
    model, optimizer = trained(amp, mlp(norm=True), count=2)
    for change in each(amp, BETWEEN):
        change(amp, model, optimizer)
        plain_loop(amp, model, optimizer, 2)
