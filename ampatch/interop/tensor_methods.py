"""Saves and copies parameters instead of half copies, and notices writes through `.data`.

* A state dict, copy or pickle may be made while a forward of an O2 model runs, in this thread (a
  momentum encoder at its first forward) or in another thread.  The result has the weights, not the
  half copies in their slots.
* A write through `tensor.data` does not bump the tensor's version.  After an access to `.data`, a
  weight is cast again, and the values of a half copy are compared when the forward ends.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..casting.patches import Patch
from ..config.opt_levels import HALF_DTYPES
from ..models.half_copy_swaps import parameter_of_copy


def data_patches(listener: Callable[[Tensor], None]) -> list[Patch]:
    """The patch of `Tensor.data`: `listener(tensor)` is called before `.data` is read or set.

    `Tensor` gets its own property, which hides the inherited property.
    """

    def make(original: Any) -> property:
        def get(tensor: Tensor) -> Tensor:
            listener(tensor)
            return original.__get__(tensor)

        def set(tensor: Tensor, data: Tensor) -> None:
            listener(tensor)
            original.__set__(tensor, data)

        def delete(tensor: Tensor) -> None:
            original.__delete__(tensor)  # raises torch's error

        return property(get, set, delete, doc=Tensor.data.__doc__)

    return [(Tensor, "data", make)]


def copy_patches() -> list[Patch]:
    """The patches of deep copies and pickles, which copy and pickle the weight of a half copy."""

    def deepcopy(original: Callable) -> Callable:
        @functools.wraps(original)
        def __deepcopy__(self: Tensor, memo: dict) -> Any:
            parameter = parameter_of_copy(self)
            return original(self, memo) if parameter is None else copy.deepcopy(parameter, memo)

        return __deepcopy__

    def reduce(original: Callable) -> Callable:
        @functools.wraps(original)
        def __reduce_ex__(self: Tensor, protocol: Any) -> Any:
            parameter = parameter_of_copy(self)
            if parameter is None:
                return original(self, protocol)
            return parameter.__reduce_ex__(protocol)

        return __reduce_ex__

    return [(Tensor, "__deepcopy__", deepcopy), (Tensor, "__reduce_ex__", reduce)]


def load_state_dict_patches(on_load: Callable[[nn.Module], None]) -> list[Patch]:
    """The patch of `load_state_dict`: `on_load(module)` is called when a module has loaded one."""

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def load_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            loaded = original(self, *args, **kwargs)
            on_load(self)
            return loaded

        return load_state_dict

    return [(nn.Module, "load_state_dict", make)]


def state_dict_patches() -> list[Patch]:
    """The patch of `state_dict`, which saves parameters instead of half copies."""

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            state = original(self, *args, **kwargs)  # calls `state_dict` of each submodule
            prefix = args[1] if len(args) > 1 else kwargs.get("prefix", "")
            is_scripted = isinstance(self, torch.jit.ScriptModule)  # then without half copies
            for name in () if is_scripted else list(self._parameters):
                _save_parameter(state, prefix + name, self._parameters, name)
            return state

        return state_dict

    return [(nn.Module, "state_dict", make)]


def _save_parameter(state: dict, key: str, parameters: dict[str, Any], name: str) -> None:
    """Replace a half copy in a state dict with its parameter.

    With `keep_vars` the state dict has the half copy itself, which shares the `__dict__` of its
    parameter; otherwise it has a detached tensor.
    """
    value = state.get(key)
    if not isinstance(value, Tensor) or value.dtype not in HALF_DTYPES:
        return
    parameter = _parameter_at(parameters, name)
    if parameter is not None and parameter.dtype is torch.float32:
        is_kept = vars(value) is vars(parameter)
        state[key] = parameter if is_kept else parameter.detach()


def _parameter_at(parameters: dict[str, Any], name: str) -> Tensor | None:
    """The parameter of a slot, even if another thread begins or ends a forward meanwhile."""
    while True:
        entry = parameters.get(name)
        parameter = None if entry is None else parameter_of_copy(entry)
        if parameter is not None or parameters.get(name) is entry:
            return entry if parameter is None else parameter
