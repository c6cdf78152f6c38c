"""torch's gradient tools, taught about master weights.

At O2 the gradients of half parameters live in their FP32 masters.  With these
replacements `model.zero_grad()` clears those too (and, at every level, the
memory of an overflow), and `clip_grad_norm_(model.parameters(), ...)` clips
what the optimizer will use.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.utils
import torch.nn.utils.clip_grad
from torch import Tensor, nn

MasterOf = Callable[[Tensor], "Tensor | None"]

_CLIPPING = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_grads_with_norm_")


def replacements(
    master_of: MasterOf, ready: Callable[[list[Tensor]], None], zeroed: Callable[[set[int]], None]
) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """`(owner, name, make)` for each tool to replace.

    `ready` has gradients of the given tensors complete and unscaled: those that a plain
    `backward()` left in half parameters, or `delay_unscale` left scaled; `zeroed` is told which parameters (ids) have lost theirs.
    """
    places: list[tuple[Any, str, Callable]] = [
        (nn.Module, "zero_grad", lambda original: _zero_grad(original, master_of, zeroed))
    ]
    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        places.extend(
            (owner, name, lambda original: _on_masters(original, master_of, ready))
            for name in _CLIPPING
            if inspect.isfunction(getattr(owner, name, None))
        )
    return places


def _zero_grad(
    original: Callable, master_of: MasterOf, zeroed: Callable[[set[int]], None]
) -> Callable:
    @functools.wraps(original)
    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        original(self, set_to_none)
        parameters = list(self.parameters())
        for parameter in parameters:
            master = master_of(parameter)
            if master is not None and master.grad is not None:
                if set_to_none:
                    master.grad = None
                else:
                    master.grad.detach_().zero_()
        zeroed({id(parameter) for parameter in parameters})

    return zero_grad


def _on_masters(
    original: Callable, master_of: MasterOf, ready: Callable[[list[Tensor]], None]
) -> Callable:
    @functools.wraps(original)
    def on_masters(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        parameters = list(parameters)
        ready(parameters)
        own = [
            parameter if (master := master_of(parameter)) is None else master
            for parameter in parameters
        ]
        return original(own, *args, **kwargs)

    return on_masters
