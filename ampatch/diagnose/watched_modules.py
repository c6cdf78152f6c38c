"""The watched modules: their names, and which of them is running.

torch's global hooks are used.  The modules themselves do not change, so copies and pickles of
modules contain nothing of ampatch.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary


def check_model(model: Any, name: str) -> None:
    """Raise `TypeError` unless `model` is a module or None; `name` is the called function."""
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"ampatch.{name}(model=...): expected a torch.nn.Module, got {type(model).__name__}."
        )


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.running: list[nn.Module] = []


class WatchedModules:
    """The modules of one model or, if `model` is None, of every model that runs.

    Names of modules begin with the class of the model if every model is watched.

    `Sequential.0` and `Sequential#2.0` belong to two models.  `overrides` accept such names.

    `on_parameter(parameter)` is called for each new parameter, `on_enter(module, args)` and
    `on_exit(module, args, output)` around each forward; after an exception the output is None.
    """

    def __init__(
        self,
        model: nn.Module | None,
        *,
        on_parameter: Callable[[Tensor], None] = lambda parameter: None,
        on_enter: Callable[[nn.Module, tuple], None] = lambda module, args: None,
        on_exit: Callable[[nn.Module, tuple, Any], None] = lambda module, args, output: None,
    ) -> None:
        self._thread = _ThreadState()
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._parameter_names = WeakIdKeyDictionary()
        self._num_models: Counter[str] = Counter()  # by class name
        self.watches_all = model is None
        self._on_parameter = on_parameter
        self._on_enter = on_enter
        self._on_exit = on_exit
        if model is not None:
            self._name_tensors(model, "")
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    @property
    def running(self) -> list[nn.Module]:
        """The modules whose forward runs in this thread, outermost first."""
        return self._thread.running

    def remove(self) -> None:
        """Remove the hooks; the names stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def name_of(self, parameter: Tensor) -> str | None:
        """The name of a parameter, or None if it belongs to another model."""
        return self._parameter_names.get(parameter)

    def module_of(self, parameter: str) -> nn.Module | None:
        """The module that has the parameter of this name, or None."""
        path = parameter.rpartition(".")[0]
        return next((module for module, name in self.names.items() if name == path), None)

    def _name_tensors(self, model: nn.Module, prefix: str) -> None:
        for name, module in model.named_modules(prefix=prefix):
            self.names[module] = name
        for name, parameter in model.named_parameters(prefix=prefix):
            is_new = parameter not in self._parameter_names
            self._parameter_names[parameter] = name
            if is_new:
                self._on_parameter(parameter)

    def _enter(self, module: nn.Module, args: tuple) -> None:
        running = self.running
        if self.watches_all and not running and module not in self.names:
            self._name_tensors(module, self._title(module))
        if module in self.names:
            running.append(module)
            self._on_enter(module, args)

    def _title(self, model: nn.Module) -> str:
        """The model's class, with a number for the second and later models with weights."""
        title = type(model).__name__
        if next(model.parameters(), None) is not None:
            self._num_models[title] += 1
            title += f"#{self._num_models[title]}" * (self._num_models[title] > 1)
        return title

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        running = self.running
        if module not in running:
            return
        while running.pop() is not module:  # also modules whose forward was interrupted
            pass
        self._on_exit(module, args, output)
