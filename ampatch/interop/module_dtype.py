"""`model.float()`, `.half()`, `.to(dtype)` of a managed model: refused before anything changes.

So is `.float()` at O2: its weights are FP32, and forwards compute with half copies of them.  Calls
that change no dtype (`.to(device)`, `.cuda()`, a memory format) work, except between kinds of
devices where torch makes new parameters, which the optimizer would not have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..casting.patches import Replacement
from ..errors import AmpatchError
from ..models.lent_weights import lent_types
from ..torch_private.modules import APPLY
from ..torch_private.tensors import keeps_parameter

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
                _refuse_other_tensors(self, fn, model)
            running = True
            try:
                return original(self, fn, *args, **kwargs)
            finally:
                running = False

        return _apply

    return [(nn.Module, APPLY, make)]


def _refuse_other_tensors(module: nn.Module, fn: Apply, model: nn.Module) -> None:
    """Raise `AmpatchError` where `fn` changes a dtype, or torch would make new parameters."""
    half, name_of_model = lent_types(module), type(model).__name__
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor) or not tensor.is_floating_point():
            continue
        own, own_type = tensor.detach(), tensor.dtype
        for dtype in dict.fromkeys((half.get(id(tensor), own_type), own_type)):
            with torch.no_grad():
                changed = fn(own.new_empty(0, dtype=dtype))
            if changed.dtype is not dtype:
                raise AmpatchError(
                    f"{type(module).__name__} is to be converted to {changed.dtype}, and its "
                    f"{name} is managed by ampatch, in {name_of_model}, as {dtype}: neither "
                    "forwards nor optimizers would follow. Nothing was changed. For a model to "
                    "export or evaluate in another dtype take a plain copy, such as "
                    "ampatch.unwrap(model).float(), or call ampatch.deactivate() first. To train "
                    "in other dtypes choose them by ampatch.initialize(model, optimizer, "
                    'opt_level=..., dtype=..., overrides={"path.*": "float"}).'
                )
        is_plain = type(tensor) is nn.Parameter and not tensor.is_meta
        if is_plain and not keeps_parameter(own, changed):
            raise AmpatchError(
                f"{type(module).__name__} is to go from {tensor.device} to {changed.device}, where "
                f"torch makes new parameters, and the optimizers of {name_of_model} would keep the "
                "old ones. Nothing was changed. Move the model before ampatch.initialize."
            )
