"""Half models by hand: conversion, and FP32 copies of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from ampatch.torch_private.modules import BATCH_NORMS

from ..amp_c import flatten, unflatten

__all__ = [
    "BN_convert_float",
    "FP16Model",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]

clip_grad_norm = clip_grad_norm_


class tofp16(nn.Module):  # apex's name
    """A layer that converts its input to FP16."""

    def forward(self, input: Tensor) -> Tensor:
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:  # apex's name
    """Convert batch norms that have weights to FP32, in place."""
    for submodule in module.modules():
        if _stays_fp32(submodule):
            submodule.float()
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """Convert a network to FP16, batch norms to FP32, and put a layer that casts its input first.

    The network itself is converted, and is item 1 of the `nn.Sequential` returned.
    """
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert a module's own floating parameters and buffers, not those of its submodules."""
    for param in module._parameters.values():
        if param is not None and param.is_floating_point():
            param.data = param.data.to(dtype)
            if param.grad is not None:
                param.grad.data = param.grad.data.to(dtype)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a network in place, except batch norms that have weights."""
    for module in network.modules():
        if _stays_fp32(module):
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


def _stays_fp32(module: nn.Module) -> bool:
    return isinstance(module, BATCH_NORMS) and module.affine


class FP16Model(nn.Module):
    """A network in FP16 whose positional floating inputs are converted to FP16."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.half)

    def forward(self, *inputs: Any) -> Any:
        """The network's output, unchanged."""
        return self.network(*(_to_half(value) for value in inputs))


def _to_half(value: Any) -> Any:
    return value.half() if isinstance(value, Tensor) and value.is_floating_point() else value


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """The model's trainable parameters, and FP32 copies for the optimizer.

    With `flat_master` the second list holds one 1-dim parameter for all of them;
    raises `TypeError` unless they have one dtype.
    """
    model_params = [param for param in model.parameters() if param.requires_grad]
    values = [param.detach().float() for param in model_params]
    if not flat_master:
        return model_params, [nn.Parameter(value.clone()) for value in values]
    dtypes = {param.dtype for param in model_params}
    if len(dtypes) > 1:
        raise TypeError(
            "prep_param_lists(flat_master=True): the model's parameters have several dtypes "
            f"({', '.join(sorted(map(str, dtypes)))}). Expected one; pass flat_master=False."
        )
    master = nn.Parameter(flatten(values))
    master.grad = torch.zeros_like(master)
    return model_params, [master]


def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the model's gradients to the FP32 copies, without unscaling."""
    if flat_master:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
        master_params[0].grad = flatten(grads).detach().float()
        return
    for param, master in zip(model_params, master_params, strict=True):
        master.grad = None if param.grad is None else param.grad.detach().float().clone()


def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the FP32 copies into the model's parameters."""
    values = [master.detach() for master in master_params]
    if flat_master:
        values = unflatten(values[0], model_params)
    with torch.no_grad():
        for param, value in zip(model_params, values, strict=True):
            param.copy_(value)


def to_python_float(value: Any) -> float:
    """The number in a tensor of one element, or the first of a sequence."""
    return value.item() if hasattr(value, "item") else value[0]
