"""`model.float()`, `.half()`, `.to(dtype)` of a managed model: refused before anything changes.

So is `.float()` at O2: its weights are FP32, and forwards compute with half copies of them.  Calls
that change no dtype (`.to(device)`, `.cuda()`, a memory format) work.  The parameters stay
the same objects on every kind of device, so the optimizer has them still.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..casting.patches import Replacement
from ..errors import AmpatchError
from ..models.lent_weights import lent_types
from ..torch_private.modules import APPLY
from ..torch_private.tensors import can_take_data

Apply = Callable[[Tensor], Tensor]


def replacements(model_of: Callable[[nn.Module], nn.Module | None]) -> list[Replacement]:
    """What to replace.

    `model_of(module)` gives a managed model that shares tensors with a module, or None.
    """
    if not hasattr(nn.Module, APPLY):
        return []

    def make(original: Callable) -> Callable:
        running = False  # within a call for the module around this one

        @functools.wraps(original)
        def _apply(self: nn.Module, fn: Apply, *args: Any, **kwargs: Any) -> nn.Module:
            nonlocal running
            if running:
                return original(self, fn, *args, **kwargs)
            model = model_of(self)
            if model is not None:
                _refuse_new_dtypes(self, fn, model)
            running = True
            try:
                with _same_parameters(self, fn, model):
                    return original(self, fn, *args, **kwargs)
            finally:
                running = False

        return _apply

    return [(nn.Module, APPLY, make)]


@contextmanager
def _same_parameters(module: nn.Module, fn: Apply, model: nn.Module | None) -> Iterator[None]:
    """Inside, torch moves the parameters of a managed model and makes no new ones for it."""
    if model is None or all(_takes_in_place(fn, each) for each in module.parameters()):
        yield
        return
    known = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is None:  # the move itself failed: memory is short, say
            raise
        raise AmpatchError(
            f"{type(module).__name__} is to go to another device, and torch could not move all of "
            f"its parameters, which {type(model).__name__}'s optimizers are to keep: {error} "
            f"({error.__cause__}). Delete the model's outputs and losses and weak references to "
            "its parameters, and move it again; or move it before ampatch.initialize."
        ) from error
    finally:
        torch.__future__.set_swap_module_params_on_conversion(known)


def _takes_in_place(fn: Apply, parameter: Tensor) -> bool:
    if is_lazy(parameter) or parameter.is_meta:  # neither has values that an optimizer could lose
        return True
    data = parameter.detach()
    with torch.no_grad():
        return can_take_data(data, fn(data.new_empty(0)))


def _refuse_new_dtypes(module: nn.Module, fn: Apply, model: nn.Module) -> None:
    """Raise `AmpatchError` where `fn` changes a dtype, or that of the half copies of a weight."""
    lent = lent_types(module)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor) or not tensor.is_floating_point():
            continue
        for dtype in dict.fromkeys((tensor.dtype, lent.get(id(tensor), tensor.dtype))):
            with torch.no_grad():
                wanted = fn(tensor.data.new_empty(0, dtype=dtype)).dtype
            if wanted is not dtype:
                why = (
                    f"it is {dtype} and the optimizer would not follow"
                    if dtype is tensor.dtype
                    else f"forwards would go on computing with its copy in {dtype}"
                )
                raise AmpatchError(
                    f"{type(module).__name__} is to be converted to {wanted}, and its {name} is "
                    f"managed by ampatch, in {type(model).__name__}: {why}. Nothing was changed. "
                    "For a model to export or evaluate in another dtype take a plain copy, such "
                    "as ampatch.unwrap(model).float(), or call ampatch.deactivate() first. To "
                    "train in other dtypes choose them by ampatch.initialize(model, optimizer, "
                    'opt_level=..., dtype=..., overrides={"path.*": "float"}).'
                )
