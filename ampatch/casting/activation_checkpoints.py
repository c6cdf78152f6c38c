"""Activation checkpoints: the recompute makes the casts of the forward.

It runs in backward, perhaps in another thread and after the model's forward has ended, so it takes
its policy along.  What `checkpoint` itself calls is replaced, since its callers hold it already:
`checkpoint_wrapper` and transformers in a `partial`; and Dynamo knows it by its identity.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch.utils.checkpoint

from ..torch_private.checkpoints import no_reentry
from .cast_state import CastState
from .patches import Replacement


def parts(state: CastState) -> list[Replacement]:
    """`(owner, name, make)` for what has to be replaced."""
    owner = torch.utils.checkpoint
    name = no_reentry()
    if name is None:
        return [(owner, "checkpoint", lambda original: _whole(original, state))]
    return [
        (owner, name, lambda original: _without_reentry(original, state)),
        (owner.CheckpointFunction, "forward", lambda original: _reentrant(original, state)),
    ]


def _following(function: Callable, state: CastState) -> Callable:
    """`function` under the policy of now, with half copies of weights of its own."""
    if torch.compiler.is_compiling():
        return function
    policy = state.of_forward()
    if policy is not None:
        function = policy.cache.apart()(function)
    for lending in state.thread.lent:
        function = lending.again()(function)
    return state.under(lambda: policy, state.under_user_control())(function)


def _without_reentry(original: Callable, state: CastState) -> Callable:
    def generator(function: Callable, *args: Any, **kwargs: Any) -> Generator[None]:
        policy = state.of_forward()
        around = original(_following(function, state), *args, **kwargs)
        if policy is None or torch.compiler.is_compiling():
            yield from around
            return
        with policy.cache.apart():
            yield from around

    return generator


def _reentrant(original: Any, state: CastState) -> Any:
    run = original.__func__

    def forward(ctx: Any, function: Callable, *args: Any) -> Any:
        return run(ctx, _following(function, state), *args)

    return staticmethod(forward)


def _whole(original: Callable, state: CastState) -> Callable:
    def checkpoint(function: Callable, *args: Any, **kwargs: Any) -> Any:
        return original(_following(function, state), *args, **kwargs)

    return checkpoint
