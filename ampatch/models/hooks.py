"""Hooks that copies do not have: a deep-copied or unpickled model is a plain one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ..torch_private.modules import HOOK_FLAGS, HOOK_TABLES


class Hook(functools.partial):
    """A hook of ampatch.  In a copy or a pickle it does nothing: copies are plain."""

    def __deepcopy__(self, memo: dict) -> Callable:
        return plain_hook

    def __reduce__(self) -> tuple:
        return _the_plain_hook, ()


def plain_hook(*args: Any, **kwargs: Any) -> None:
    """What is left of a hook in a copied or unpickled part of a managed model: nothing."""


def _the_plain_hook() -> Callable:
    return plain_hook


def drop_plain_hooks(module: nn.Module) -> None:
    """Take what is left of ampatch's hooks out of a copied module."""
    for table in HOOK_TABLES:
        hooks = getattr(module, table, {})
        for key in [key for key, hook in hooks.items() if _is_plain(hook)]:
            del hooks[key]
            for flags in HOOK_FLAGS:
                getattr(module, flags, {}).pop(key, None)


def _is_plain(hook: Any) -> bool:
    return hook is plain_hook or getattr(hook, "hook", None) is plain_hook
