"""The script's hooks on tensors get unscaled gradients inside a backward pass.

Otherwise `x.register_hook(lambda grad: grad.clamp(-1, 1))` would clip scaled numbers.  Hooks that
run after a gradient has been accumulated (an optimizer step inside the backward pass) wait for the
end of the pass.  Other ways to see gradients within a scaled pass are refused.
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

_WRAPPED = "_ampatch_gets_unscaled_gradients"
_REFUSED = (
    (torch.Tensor, "retain_grad"),
    (nn.Module, "register_full_backward_hook"),
    (nn.Module, "register_full_backward_pre_hook"),
)


def install(patches: PatchSet, passes: BackwardPasses) -> None:
    """Replace the functions that register hooks, where passes are scaled."""

    def wrapping(wrap: Callable[..., Callable], original: Callable) -> Callable:
        @functools.wraps(original)
        def register(self: Tensor, hook: Callable) -> Any:
            if not hasattr(hook, _WRAPPED):  # a tensor subclass calls this a second time
                hook = wrap(hook, passes)
                setattr(hook, _WRAPPED, True)
            return original(self, hook)

        return register

    patches.replace(torch.Tensor, "register_hook", functools.partial(wrapping, _unscaling))
    name = "register_post_accumulate_grad_hook"
    patches.replace(torch.Tensor, name, functools.partial(wrapping, _waiting))
    for owner, name in _REFUSED:
        patches.replace(owner, name, functools.partial(_refusing, f"{owner.__name__}.{name}"))


def _refusing(name: str, original: Callable) -> Callable:
    @functools.wraps(original)
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, Tensor) and name.endswith("retain_grad") and self.is_leaf:
            return original(self, *args, **kwargs)
        raise AmpatchError(
            f"--auto scales backward passes in float16, and {name} would show scaled gradients. "
            "Expected --dtype bfloat16, which needs no scale, or two lines in the script: import "
            "ampatch, and behind model and optimizer model, optimizer = "
            "ampatch.initialize(model, optimizer)."
        )

    return refuse


def _waiting(hook: Callable, passes: BackwardPasses) -> Callable:
    @functools.wraps(hook)
    def on_accumulated(tensor: Tensor) -> None:
        if passes.scale is None:
            hook(tensor)
        else:
            passes.deferred_hooks.append(functools.partial(hook, tensor))

    return on_accumulated


def _unscaling(hook: Callable, passes: BackwardPasses) -> Callable:
    @functools.wraps(hook)
    def on_gradient(grad: Tensor) -> Tensor | None:
        if passes.scale is None:
            return hook(grad)
        scale = passes.scale
        scale = scale.to(grad.device) if isinstance(scale, Tensor) else scale
        is_half = grad.dtype in (torch.float16, torch.bfloat16)
        shown = (grad.float() if is_half else grad) / scale  # in FP32, where it does not underflow
        before = shown._version
        result = hook(shown)
        if result is None and shown._version == before:
            return None
        return ((shown if result is None else result) * scale).to(grad.dtype)

    return on_gradient
