"""Hooks that move a half weight's gradient to its master when a plain backward pass has made it.

So `param_groups` show them when `loss.backward()` returns, and several passes add up in FP32.
Inside a `scale_loss` block that is the block's work, done in batches; a script that writes blocks
does not pay for hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


class Arrivals:
    """Hooks on half weights that run when autograd has left a gradient in one.

    `arrived` is a bound method, called with the weight; it is held weakly.
    """

    def __init__(self, arrived: Callable[[Tensor], Any]) -> None:
        self._arrived = weakref.WeakMethod(arrived)
        self._handles: dict[int, Any] = {}

    def __bool__(self) -> bool:
        """Whether any weight is watched."""
        return bool(self._handles)

    def watch(self, halves: Iterable[Tensor]) -> None:
        """Hang a hook on each that has none and can have one."""
        known = self._arrived

        def hook(half: Tensor) -> None:
            arrived = known()
            if arrived is not None:
                arrived(half)

        for half in halves:
            if id(half) not in self._handles and half.requires_grad and half.is_leaf:
                self._handles[id(half)] = half.register_post_accumulate_grad_hook(hook)

    def forget(self) -> None:
        """Take all hooks down."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
