"""The script's hooks on tensors get unscaled gradients inside a backward pass.

Otherwise `x.register_hook(lambda grad: grad.clamp(-1, 1))` would clip scaled numbers.  Hooks that
run after a gradient has been accumulated (an optimizer step inside the backward pass) are deferred
to the end of the pass.  Other ways to see gradients within a scaled pass are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AmpatchError
from ..session.facade import PatchSet
from .backward import BackwardPasses

_WRAPPED_ATTRIBUTE = "_ampatch_gets_unscaled_gradients"
_REFUSED_METHODS = (
    (torch.Tensor, "retain_grad"),
    (nn.Module, "register_full_backward_hook"),
    (nn.Module, "register_full_backward_pre_hook"),
)


def install(patches: PatchSet, passes: BackwardPasses) -> None:
    """Replace the functions that register hooks."""

    def registering(wrap: Callable[..., Callable], original: Callable) -> Callable:
        @functools.wraps(original)
        def register(self: Tensor, hook: Callable) -> Any:
            if not hasattr(hook, _WRAPPED_ATTRIBUTE):  # a tensor subclass calls this a second time
                hook = wrap(hook, passes)
                setattr(hook, _WRAPPED_ATTRIBUTE, True)
            return original(self, hook)

        return register

    patches.replace(torch.Tensor, "register_hook", functools.partial(registering, _show_unscaled))
    name = "register_post_accumulate_grad_hook"
    patches.replace(torch.Tensor, name, functools.partial(registering, _defer_hook))
    for owner, name in _REFUSED_METHODS:
        patches.replace(owner, name, functools.partial(_refuse_call, f"{owner.__name__}.{name}"))


def _refuse_call(name: str, original: Callable) -> Callable:
    @functools.wraps(original)
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, Tensor) and name.endswith("retain_grad") and self.is_leaf:
            return original(self, *args, **kwargs)
        raise AmpatchError(
            f"--auto scales backward passes in float16, and {name} would show scaled gradients. "
            "Expected --dtype bfloat16, which needs no scale. Or leave --auto out, import ampatch, "
            "and after you make model and optimizer, add: model, optimizer = "
            "ampatch.initialize(model, optimizer)"
        )

    return refuse


def _defer_hook(hook: Callable, passes: BackwardPasses) -> Callable:
    """The hook, called at the end of a scaled pass."""

    @functools.wraps(hook)
    def on_accumulated(tensor: Tensor) -> None:
        if passes.scale is None:
            hook(tensor)
        else:
            passes.deferred_hooks.append(functools.partial(hook, tensor))

    return on_accumulated


def _show_unscaled(hook: Callable, passes: BackwardPasses) -> Callable:
    """A hook that gets the unscaled gradient; the gradient that `hook` returns is scaled again."""

    @functools.wraps(hook)
    def on_gradient(grad: Tensor) -> Tensor | None:
        if passes.scale is None:
            return hook(grad)
        scale = passes.scale
        scale = scale.to(grad.device) if isinstance(scale, Tensor) else scale
        is_half = grad.dtype in (torch.float16, torch.bfloat16)
        unscaled = (grad.float() if is_half else grad) / scale  # FP32 does not underflow
        version = unscaled._version
        result = hook(unscaled)
        if result is None and unscaled._version == version:
            return None
        return ((unscaled if result is None else result) * scale).to(grad.dtype)

    return on_gradient
