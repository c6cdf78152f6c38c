"""State dicts, copies and pickles have parameters, and writes through `.data` are seen.

* A state dict, copy or pickle that is made while a forward of an O2 model runs (as by a momentum
  encoder at the first forward), in this thread or beside it, has the weights, not the half copies
  that stand in their places.
* `tensor.data`: a write through it raises no version.  A weight is cast anew, and values of a half
  copy that stands in a weight's place are compared as its forward ends.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..casting.patches import Replacement
from ..config.opt_levels import HALF_TYPES
from ..models.lent_weights import parameter_behind


def data(listener: Callable[[Tensor], None]) -> list[Replacement]:
    """What to replace: `listener(tensor)` is called before `.data` is read or set.

    `Tensor` gets a property of its own in place of the one that it inherits.
    """

    def make(original: Any) -> property:
        def get(tensor: Tensor) -> Tensor:
            listener(tensor)
            return original.__get__(tensor)

        def set(tensor: Tensor, data: Tensor) -> None:
            listener(tensor)
            original.__set__(tensor, data)

        def delete(tensor: Tensor) -> None:
            original.__delete__(tensor)  # torch's error

        return property(get, set, delete, doc=Tensor.data.__doc__)

    return [(Tensor, "data", make)]


def copies() -> list[Replacement]:
    """What to replace: copies and pickles of half copies are of the weights behind them."""

    def deepcopy(original: Callable) -> Callable:
        @functools.wraps(original)
        def __deepcopy__(self: Tensor, memo: dict) -> Any:
            parameter = parameter_behind(self)
            return original(self, memo) if parameter is None else copy.deepcopy(parameter, memo)

        return __deepcopy__

    def reduce(original: Callable) -> Callable:
        @functools.wraps(original)
        def __reduce_ex__(self: Tensor, protocol: Any) -> Any:
            parameter = parameter_behind(self)
            if parameter is None:
                return original(self, protocol)
            return parameter.__reduce_ex__(protocol)

        return __reduce_ex__

    return [(Tensor, "__deepcopy__", deepcopy), (Tensor, "__reduce_ex__", reduce)]


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
