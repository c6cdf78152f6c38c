"""Notices that a module has got a parameter or a submodule: what was found in models is old."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class Registrations:
    """Tells of each registration in the process, while somebody watches."""

    def __init__(self) -> None:
        self.tell: Callable[[nn.Module, Any], None] = lambda module, value: None
        """Called with a module and the parameter or submodule that it gets."""
        self._watchers = 0
        self._handles: list[Any] = []

    def watch(self) -> None:
        """Begin to tell, until as many calls of `stop`."""
        self._watchers += 1
        if not self._handles:
            self._handles = [
                register_module_parameter_registration_hook(self._note),
                register_module_module_registration_hook(self._note),
            ]

    def stop(self) -> None:
        """Take the hooks out, if nobody else watches."""
        self._watchers -= 1
        while not self._watchers and self._handles:
            self._handles.pop().remove()

    def _note(self, module: nn.Module, name: str, value: Any) -> None:
        self.tell(module, value)


registrations = Registrations()
