"""`clip_grad_norm_` unscales gradients first; `model.zero_grad()` resets a recorded overflow."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.utils
import torch.nn.utils.clip_grad
from torch import Tensor, nn

from ..casting.patches import Patch

_CLIPPERS = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_grads_with_norm_")


def patches(
    unscale: Callable[[list[Tensor], bool], None],
    on_zeroed: Callable[[set[int]], None],
) -> list[Patch]:
    """The patches of the clipping functions and of `nn.Module.zero_grad`.

    `unscale(tensors, by_norm)` unscales gradients of these tensors that `delay_unscale` left
    scaled; `by_norm` says whether the gradients are clipped by their common norm.
    `on_zeroed(ids)` is called with the ids of the parameters whose gradients were zeroed.
    """

    def make_zero_grad(original: Callable) -> Callable:
        @functools.wraps(original)
        def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
            original(self, set_to_none)
            on_zeroed(set(map(id, self.parameters())))

        return zero_grad

    def make_clip(original: Callable) -> Callable:
        @functools.wraps(original)
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            unscale(parameters, original.__name__ != "clip_grad_value_")
            return original(parameters, *args, **kwargs)

        return clip

    return [
        (nn.Module, "zero_grad", make_zero_grad),
        *(
            (owner, name, make_clip)
            for owner in (torch.nn.utils, torch.nn.utils.clip_grad)
            for name in _CLIPPERS
            if inspect.isfunction(getattr(owner, name, None))
        ),
    ]
