"""Small problems for apex's optimizers."""

import copy

import torch
from torch import nn

START = [torch.linspace(-1, 1, 6).reshape(2, 3), torch.tensor([0.5, -2.0]), torch.zeros(3)]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(value.clone()) for value in START]


def gradients(step: int) -> list[torch.Tensor]:
    data = torch.Generator().manual_seed(step)
    return [torch.randn(value.shape, generator=data) * 3 for value in START]


def run(make, steps: int = 4) -> list[torch.Tensor]:
    """The parameters after some steps of the optimizer that `make(parameters)` gives."""
    params = parameters()
    optimizer = make(params)
    for step in range(steps):
        for param, grad in zip(params, gradients(step), strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return [param.detach() for param in params]


def as_apex_saves(state: dict, steps: int) -> dict:
    """An optimizer's state with apex's options alone, and the steps counted in the group."""
    own = "params lr betas eps weight_decay bias_correction grad_averaging max_grad_norm norm_type"
    saved = copy.deepcopy(state)
    for group in saved["param_groups"]:
        for name in set(group) - {"init_zero", *own.split()}:
            del group[name]
        group["step"] = steps
    for entry in saved["state"].values():
        entry.pop("step", None)
    return saved


def close(ours, theirs) -> None:
    for first, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(first, other.to(first.dtype), atol=1e-6, rtol=1e-5)
