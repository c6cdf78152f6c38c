"""Notices that some module has got a parameter or a submodule: what was found in models is old."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class Registrations:
    """`count` grows with each registration in the process, while somebody watches."""

    def __init__(self) -> None:
        self.count = 0
        self.tell: Callable[[nn.Module, nn.Module], None] = lambda parent, part: None
        """Called for each submodule that a module gets, while somebody watches."""
        self._watchers = 0
        self._handles: list[Any] = []

    def watch(self) -> None:
        """Begin to count, until as many calls of `stop`."""
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
        self.count += 1
        if isinstance(value, nn.Module) and not is_dynamo_compiling():
            self.tell(module, value)


registrations = Registrations()
