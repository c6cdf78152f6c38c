"""The script's hooks inside a backward pass get unscaled gradients.

Otherwise `x.register_hook(lambda grad: grad.clamp(-1, 1))` would clip scaled numbers.
Hooks that run after a gradient has been accumulated (an optimizer step inside the
backward pass) wait for the end of the pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..session.facade import PatchSet
from .backward import Passes

_WRAPPED = "_ampatch_gets_unscaled_gradients"


def put(patches: PatchSet, passes: Passes) -> None:
    """Replace the functions that register hooks on tensors and modules."""

    def wrapping(wrap: Callable[[Callable, Passes], Callable]) -> Callable[[Any], Any]:
        def make(original: Callable) -> Callable:
            @functools.wraps(original)
            def register(self: Any, hook: Callable, *args: Any, **kwargs: Any) -> Any:
                if not hasattr(hook, _WRAPPED):  # a tensor subclass calls this a second time
                    hook = wrap(hook, passes)
                    setattr(hook, _WRAPPED, True)
                return original(self, hook, *args, **kwargs)

            return register

        return make

    patches.replace(torch.Tensor, "register_hook", wrapping(_on_tensor))
    patches.replace(torch.Tensor, "register_post_accumulate_grad_hook", wrapping(_afterwards))
    for name in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        patches.replace(nn.Module, name, wrapping(_on_module))
    patches.replace(torch.Tensor, "retain_grad", lambda original: _retaining(original, passes))


def _on_tensor(hook: Callable, passes: Passes) -> Callable:
    @functools.wraps(hook)
    def on_gradient(grad: Tensor) -> Tensor | None:
        scale = passes.scale
        if scale is None:
            return hook(grad)
        shown = _unscaled(grad, scale)
        before = shown._version
        given = hook(shown)
        if given is None and shown._version == before:
            return None
        return _scaled(shown if given is None else given, grad, scale)

    return on_gradient


def _on_module(hook: Callable, passes: Passes) -> Callable:
    @functools.wraps(hook)
    def on_gradients(module: nn.Module, *grads: Any) -> Any:
        scale = passes.scale
        if scale is None:
            return hook(module, *grads)
        given = hook(module, *(_all_unscaled(several, scale) for several in grads))
        if given is None:
            return None
        if isinstance(given, Tensor):
            return _scaled(given, grads[0][0], scale)
        return tuple(_scaled(new, old, scale) for new, old in zip(given, grads[0], strict=True))

    return on_gradients


def _afterwards(hook: Callable, passes: Passes) -> Callable:
    @functools.wraps(hook)
    def on_accumulated(tensor: Tensor) -> None:
        if passes.scale is None:
            hook(tensor)
        else:
            passes.afterwards(hook, tensor)

    return on_accumulated


def _retaining(original: Callable, passes: Passes) -> Callable:
    @functools.wraps(original)
    def retain_grad(self: Tensor) -> None:
        original(self)
        if not self.is_leaf:
            passes.retain(self)

    return retain_grad


def _all_unscaled(grads: Any, scale: Any) -> Any:
    if isinstance(grads, tuple):
        return tuple(None if grad is None else _unscaled(grad, scale) for grad in grads)
    return None if grads is None else _unscaled(grads, scale)


def _unscaled(grad: Tensor, scale: Any) -> Tensor:
    """The unscaled gradient; a half gradient in FP32, where it does not underflow."""
    wide = grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
    return wide / _on_device_of(scale, grad)


def _scaled(given: Any, like: Any, scale: Any) -> Any:
    if not isinstance(given, Tensor):
        return given
    scaled = given * _on_device_of(scale, given)
    return scaled.to(like.dtype) if isinstance(like, Tensor) else scaled


def _on_device_of(scale: Any, tensor: Tensor) -> Any:
    return scale.to(tensor.device) if isinstance(scale, Tensor) else scale
