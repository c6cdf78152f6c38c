"""Hooks that vanish from copies: a deep-copied or unpickled model is a plain one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


class Hook(functools.partial):
    """A hook of ours.  In a copy or a pickle it is nothing: copies are plain."""

    def __deepcopy__(self, memo: dict) -> Callable:
        return plain_hook

    def __reduce__(self) -> tuple:
        return _the_plain_hook, ()


def plain_hook(*args: Any, **kwargs: Any) -> None:
    """What is left of a hook in a copied or unpickled part of a managed model: nothing."""


def _the_plain_hook() -> Callable:
    return plain_hook


_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_HOOK_FLAGS = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


def drop_plain_hooks(module: nn.Module) -> None:
    """Take what is left of our hooks out of a copied module."""
    for table in _HOOK_TABLES:
        hooks = getattr(module, table, {})
        for key in [key for key, hook in hooks.items() if _is_plain(hook)]:
            del hooks[key]
            for flags in _HOOK_FLAGS:
                getattr(module, flags, {}).pop(key, None)


def _is_plain(hook: Any) -> bool:
    return hook is plain_hook or getattr(hook, "hook", None) is plain_hook


def add_state_dict_hook(module: nn.Module, call: Callable) -> Any:
    """Have `call(module, state_dict, prefix, metadata)` run after `state_dict()`, before other hooks."""
    if hasattr(module, "register_state_dict_post_hook"):
        handle = module.register_state_dict_post_hook(Hook(call))
    else:
        handle = module._register_state_dict_hook(Hook(call))
    hooks = getattr(module, "_state_dict_hooks", None)
    if handle.id in (hooks or ()):  # where torch keeps them elsewhere, in the order they came
        hooks.move_to_end(handle.id, last=False)
    return handle


def add_load_hook(module: nn.Module, call: Callable) -> Any:
    """Have `call(module, state_dict, prefix, ...)` run before the module loads its own tensors."""
    if hasattr(module, "register_load_state_dict_pre_hook"):
        return module.register_load_state_dict_pre_hook(Hook(call))
    return module._register_load_state_dict_pre_hook(Hook(call, module))


def add_loaded_hook(module: nn.Module, call: Callable) -> Any:
    """Have `call(module, incompatible_keys)` run when the module and its children have loaded."""
    return module.register_load_state_dict_post_hook(Hook(call))
