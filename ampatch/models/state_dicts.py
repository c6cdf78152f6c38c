"""`state_dict()` and `load_state_dict()` of a half model hold FP32 values.

The state-dict hook is the first one of each module, and replaces only what is the module's half
tensor itself.  So whatever the user's own hooks, `_save_to_state_dict` or `state_dict` put there
comes out.  What is loaded reaches the masters as the user's load hooks have left it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_private.dtensors import is_dtensor
from .hooks import add_load_hook, add_loaded_hook, add_state_dict_hook


class StateDictHooks:
    """The hooks of one model.

    `float_value(tensor, keep_vars)` is what a checkpoint holds for a tensor, with `keep_vars` the
    parameter itself.  `load(tensor, values)` takes the values of a checkpoint to where they are
    kept in FP32.
    """

    def __init__(
        self,
        model: nn.Module,
        float_value: Callable[[Tensor, bool], Tensor],
        load: Callable[[Tensor, Tensor], None],
    ) -> None:
        self._model = model
        self._float_value = float_value
        self._load = load
        self._loading: dict[int, tuple[dict, str, dict[str, Any]]] = {}

    def install(self) -> list[Any]:
        """Hang the hooks on every module; returns their handles."""
        handles = []
        for module in _hookable(self._model):
            handles.append(add_state_dict_hook(module, self._save_float))
            handles.append(add_load_hook(module, self._before_load))
            handles.append(add_loaded_hook(module, self._after_load))
        return handles

    def _save_float(self, module: nn.Module, state_dict: dict, prefix: str, metadata: Any) -> None:
        for name, tensor in _own_tensors(module):
            saved = state_dict.get(prefix + name)
            if saved is not None and _is_same_memory(saved, tensor):
                value = self._float_value(tensor, saved is tensor)
                if value is not tensor:
                    state_dict[prefix + name] = value

    def _before_load(self, module: nn.Module, state_dict: dict, prefix: str, *rest: Any) -> None:
        """Load the values as they are now; the user's hooks may come after this one."""
        given: dict[str, Any] = {}
        for name, tensor in _own_tensors(module):
            loaded: Any = state_dict.get(prefix + name)
            given[name] = loaded
            if _may_be_values_of(loaded, tensor):
                self._load(tensor, loaded)
        self._loading[id(module)] = state_dict, prefix, given

    def _after_load(self, module: nn.Module, keys: Any) -> None:
        """Load the values that the user's load hooks have put there since."""
        state_dict, prefix, given = self._loading.pop(id(module), ({}, "", {}))
        for name, tensor in _own_tensors(module):
            loaded: Any = state_dict.get(prefix + name)
            if loaded is not given.get(name) and _may_be_values_of(loaded, tensor):
                self._load(tensor, loaded)


def _is_same_memory(saved: Any, tensor: Tensor) -> bool:
    """Whether what is in a state dict is the module's own tensor, or `tensor.detach()`."""
    if saved is tensor:
        return True
    if not isinstance(saved, Tensor) or saved.dtype is not tensor.dtype:
        return False
    if saved.shape != tensor.shape:
        return False
    # others may have no memory to point at
    is_plain = type(saved) is Tensor and saved.layout is torch.strided
    return saved.data_ptr() == tensor.data_ptr() if is_plain else True


def _may_be_values_of(loaded: Any, tensor: Tensor) -> bool:
    """Whether torch will copy what is loaded into a module's tensor; else it raises its error."""
    return (
        isinstance(loaded, Tensor)
        and loaded.shape == tensor.shape
        and is_dtensor(loaded) is is_dtensor(tensor)
    )


def _hookable(model: nn.Module) -> Iterator[nn.Module]:
    """Every module but TorchScript ones, which take no state_dict hooks; the model itself."""
    for module in model.modules():
        if module is model or not isinstance(module, torch.jit.ScriptModule):
            yield module


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`(name, tensor)` of what a module's hooks answer for: its own, its TorchScript children's."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)
    for name, child in module.named_children():
        if isinstance(child, torch.jit.ScriptModule):
            yield from child.named_parameters(name, remove_duplicate=False)
            yield from child.named_buffers(name, remove_duplicate=False)
