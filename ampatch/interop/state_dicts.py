"""State dicts have parameters, also where half copies stand in their places.

One may be made within a forward at O2, or beside one in another thread.
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


def loading(after: Callable[[nn.Module], None]) -> list[Replacement]:
    """What to replace, so that `after(module)` is called when a module has loaded."""

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def load_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            loaded = original(self, *args, **kwargs)
            after(self)
            return loaded

        return load_state_dict

    return [(nn.Module, "load_state_dict", make)]


def saving() -> list[Replacement]:
    """What to replace, so that state dicts have parameters."""

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            saved = original(self, *args, **kwargs)  # it calls this for each part
            prefix = args[1] if len(args) > 1 else kwargs.get("prefix", "")
            is_scripted = isinstance(self, torch.jit.ScriptModule)  # nothing is lent there
            for name in () if is_scripted else list(self._parameters):
                _save_parameter(saved, prefix + name, self._parameters, name)
            return saved

        return state_dict

    return [(nn.Module, "state_dict", make)]


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
