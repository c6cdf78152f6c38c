"""State dicts have parameters, also where half copies stand in their places.

One may be made within a forward at O2, beside one in another thread, or after one that Ctrl-C has
ended.  What such a forward has left is taken back before a module loads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..casting.patches import Replacement
from ..config.opt_levels import HALF_TYPES
from ..models.lent_weights import parameter_behind


def replacements(before: Callable[[], None]) -> list[Replacement]:
    """What to replace; `before()` is called before a module loads."""

    def saving(original: Callable) -> Callable:
        @functools.wraps(original)
        def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            saved = original(self, *args, **kwargs)  # it calls this for each part
            prefix = args[1] if len(args) > 1 else kwargs.get("prefix", "")
            is_scripted = isinstance(self, torch.jit.ScriptModule)  # nothing is lent there
            for name in () if is_scripted else list(self._parameters):
                _save_parameter(saved, prefix + name, self._parameters, name)
            return saved

        return state_dict

    def loading(original: Callable) -> Callable:
        @functools.wraps(original)
        def load_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            before()
            return original(self, *args, **kwargs)

        return load_state_dict

    return [(nn.Module, "state_dict", saving), (nn.Module, "load_state_dict", loading)]


def _save_parameter(saved: dict, key: str, table: dict[str, Any], name: str) -> None:
    """Put the parameter of a place where its half copy was saved.

    A half copy shares the attributes of its parameter; a detached one, without `keep_vars`, does
    not.
    """
    found = saved.get(key)
    if not isinstance(found, Tensor) or found.dtype not in HALF_TYPES:
        return
    parameter = _parameter_at(table, name)
    if parameter is not None and parameter.dtype is torch.float32:
        is_kept = vars(found) is vars(parameter)
        saved[key] = parameter if is_kept else parameter.detach()


def _parameter_at(table: dict[str, Any], name: str) -> Tensor | None:
    """The parameter of a place, whichever forward begins or ends in another thread meanwhile."""
    while True:
        entry = table.get(name)
        parameter = None if entry is None else parameter_behind(entry)
        if parameter is not None or table.get(name) is entry:
            return entry if parameter is None else parameter
