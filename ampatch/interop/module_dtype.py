"""Refuses `model.half()` and `model.to(dtype)` of a managed model, before anything changes.

`.float()` at O2 is refused too, because weights are FP32 and forwards compute with half copies.
Calls that change no dtype work (`.to(device)`, `.to(weight.dtype)`, a memory format), except moves
for which torch makes new parameters, because the optimizer would keep the old parameters.  All
calls work on submodules that were added after `initialize`, such as adapters of peft, unless an
optimizer has the submodule's parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..casting.patches import Patch
from ..errors import AmpatchError
from ..models.half_copy_swaps import half_copy_dtypes
from ..torch_private.modules import APPLY_METHOD
from ..torch_private.tensors import keeps_parameter

TensorFunction = Callable[[Tensor], Tensor]
IsReliedOn = Callable[[Tensor], bool]
"""Whether a session or an optimizer relies on a parameter or a buffer."""


def patches(
    model_of: Callable[[nn.Module], nn.Module | None], is_relied_on: IsReliedOn
) -> list[Patch]:
    """The patches of `nn.Module.float` and of the method behind `.half()`, `.to()` and the like.

    `model_of(module)` returns a managed model that shares tensors with `module`, or None.
    """
    if not hasattr(nn.Module, APPLY_METHOD):
        return []

    def make(original: Callable) -> Callable:
        running = False  # True in the calls for submodules

        @functools.wraps(original)
        def _apply(self: nn.Module, fn: TensorFunction, *args: Any, **kwargs: Any) -> nn.Module:
            nonlocal running
            if running:
                return original(self, fn, *args, **kwargs)
            model = model_of(self)
            if model is not None:
                for name, tensor in _managed_tensors(self, is_relied_on):
                    _refuse_other_tensor(self, name, tensor, fn, model)
            running = True
            try:
                return original(self, fn, *args, **kwargs)
            finally:
                running = False

        return _apply

    def make_float(original: Callable) -> Callable:
        @functools.wraps(original)
        def float(self: nn.Module) -> nn.Module:
            model = model_of(self)
            half_dtypes = {} if model is None else half_copy_dtypes(self)
            for name, tensor in _managed_tensors(self, is_relied_on) if half_dtypes else ():
                if id(tensor) in half_dtypes:
                    _refuse_dtype(self, name, half_dtypes[id(tensor)], torch.float32, model)
            return original(self)

        return float

    return [(nn.Module, APPLY_METHOD, make), (nn.Module, "float", make_float)]


def _managed_tensors(module: nn.Module, is_relied_on: IsReliedOn) -> Iterator[tuple[str, Tensor]]:
    """The module's floating tensors that a session or an optimizer relies on, by name."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not is_lazy(tensor) and tensor.is_floating_point() and is_relied_on(tensor):
            yield name, tensor


def _refuse_other_tensor(
    module: nn.Module, name: str, tensor: Tensor, fn: TensorFunction, model: nn.Module
) -> None:
    """Raise `AmpatchError` if `fn` changes the dtype, or torch would make a new parameter."""
    detached = tensor.detach()
    with torch.no_grad():
        changed = fn(detached.new_empty(0))
    if changed.dtype is not tensor.dtype:
        _refuse_dtype(module, name, tensor.dtype, changed.dtype, model)
    is_plain = type(tensor) is nn.Parameter and not tensor.is_meta
    if is_plain and not keeps_parameter(detached, changed):
        raise AmpatchError(
            f"{type(module).__name__} cannot move from {tensor.device} to {changed.device}: torch "
            f"makes new parameters there, and the optimizers of {type(model).__name__} would keep "
            "the old ones. Nothing was changed. Move the model before ampatch.initialize."
        )


def _refuse_dtype(
    module: nn.Module, name: str, dtype: torch.dtype, to: torch.dtype, model: nn.Module | None
) -> NoReturn:
    raise AmpatchError(
        f"{type(module).__name__} cannot be converted to {to}: ampatch manages its {name} as "
        f"{dtype}, in {type(model).__name__}, and neither forwards nor optimizers would follow. "
        "Nothing was changed. To export or evaluate in another dtype take a plain copy, such as "
        "ampatch.unwrap(model).float(), or call ampatch.deactivate() first. To train in another "
        "dtype call ampatch.initialize(model, optimizer, opt_level=..., dtype=..., "
        'overrides={"path.*": "float"}).'
    )
