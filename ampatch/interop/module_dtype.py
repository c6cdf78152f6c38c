"""`model.float()`, `.half()`, `.to(dtype)` of a managed model: refused before anything changes.

Calls that change no dtype (`.to(device)`, `.cuda()`, a memory format) work, and move the
masters too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..casting.patches import Replacement
from ..errors import AmpatchError
from ..torch_private.modules import APPLY

Apply = Callable[[Tensor], Tensor]


def replacements(
    model_of: Callable[[nn.Module], nn.Module | None],
    masters_of: Callable[[nn.Module], Iterable[tuple[Tensor, Tensor]]],
    as_plain: Callable[[set[int]], AbstractContextManager],
) -> list[Replacement]:
    """What to replace.

    `model_of(module)` gives a managed model that shares tensors with a module, or None, and
    `masters_of(module)` the module's half parameters with their masters.  Inside
    `as_plain(halves)` half parameters (ids) are of the class that torch gave them.
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
            model, pairs = model_of(self), []
            if model is not None:
                _refuse_new_dtypes(self, fn, model)
                pairs = [(half, half.data_ptr(), master) for half, master in masters_of(self)]
            running = True
            try:
                with as_plain({id(half) for half, _, _ in pairs}):
                    result = original(self, fn, *args, **kwargs)
            finally:
                running = False
            for half, place, master in pairs:
                if half.data_ptr() != place or half.device != master.device:
                    _move(master, fn)
            return result

        return _apply

    return [(nn.Module, APPLY, make)]


def _move(master: Tensor, fn: Apply) -> None:
    grad, master.grad = master.grad, None
    master.data = fn(master.data)
    if grad is not None:
        master.grad = fn(grad)


def _refuse_new_dtypes(module: nn.Module, fn: Apply, model: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor) or not tensor.is_floating_point():
            continue
        with torch.no_grad():
            wanted = fn(tensor.data.new_empty(0)).dtype
        if wanted is not tensor.dtype:
            raise AmpatchError(
                f"{type(module).__name__} is to be converted to {wanted}, and its {name} in "
                f"{tensor.dtype} is managed by ampatch, in {type(model).__name__}: "
                "optimizer and masters would not follow. Nothing was changed. Choose dtypes "
                "by ampatch.initialize(model, optimizer, opt_level=..., dtype=...), or call "
                "ampatch.deactivate() before the conversion; copy.deepcopy(model) is a plain "
                "FP32 model."
            )
