"""A model with a norm and its optimizer, their steps, and all that a session may change of them."""

import small_training
import torch
from small_training import data
from torch import nn

import ampatch


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def pair(seed=0):
    model = build(seed)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def backward(model, optimizer, step, **options):
    return small_training.backward(model, optimizer, data(step), **options).item()


def one_step(model, optimizer, step):
    return small_training.train(model, optimizer, data(step))


def values(model, optimizer):
    """FP32 weights, buffers, momentum and gradients of the masters."""
    results = list(model.state_dict().values())
    for param in ampatch.master_params(optimizer):
        results += optimizer.state[param].values()
        results += [] if param.grad is None else [param.grad]
    return [value.clone() for value in results]


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def hook_count(model):
    """Hooks, and frames of ampatch."""
    return sum(
        len(table)
        for module in model.modules()
        for name, table in vars(module).items()
        if name.endswith(("hooks", "_frames")) and hasattr(table, "__len__")
    )


class Slotted:
    """Only looks like an optimizer, and has no room for a step of ours."""

    __slots__ = ("param_groups", "state")

    def __init__(self, params):
        self.param_groups = [{"params": list(params)}]
        self.state = {}

    def step(self):
        raise NotImplementedError
