"""Notices that some module has got a parameter or a submodule: what was found in models is old."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class Registrations:
    """`count` grows with each registration, while somebody watches."""

    def __init__(self) -> None:
        self.count = 0
        self._handles: list[Any] = []

    def watch(self) -> None:
        """Begin to count."""
        if not self._handles:
            self._handles = [
                register_module_parameter_registration_hook(self._note),
                register_module_module_registration_hook(self._note),
            ]

    def stop(self) -> None:
        """Take the hooks out."""
        while self._handles:
            self._handles.pop().remove()

    def _note(self, module: nn.Module, name: str, value: Any) -> None:
        self.count += 1


registrations = Registrations()
