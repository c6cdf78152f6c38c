"""The installed packages of Lightning, and the base class of both plugins.

`lightning` and `pytorch_lightning` are the same code under two names, with separate classes: each
Trainer takes plugins of its own package only.  A class that derives from the base classes of both
packages works with either.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, NamedTuple

import ampatch

from ..integration_session import IntegrationSession, check_settings

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from ...types import HalfName, OptLevel, PluginSettings


class Package(NamedTuple):
    """The two modules of a package."""

    trainer: Any
    fabric: Any


def installed_packages() -> list[Package]:
    """The packages that are installed.  Raises `ImportError` if there is none."""
    packages = [
        Package(importlib.import_module(trainer), importlib.import_module(fabric))
        for name, trainer, fabric in (
            ("lightning", "lightning.pytorch", "lightning.fabric"),
            ("pytorch_lightning", "pytorch_lightning", "lightning_fabric"),
        )
        if importlib.util.find_spec(name) is not None
    ]
    if not packages:
        raise ImportError(
            "ampatch.integrations.lightning: neither lightning nor pytorch_lightning is "
            'installed. Install one, version 2.2 or newer: pip install "ampatch[lightning]".'
        )
    return packages


PACKAGES = installed_packages()


class Plugin:
    """Mixin of the precision plugins: their settings, session and loss scales."""

    precision = "32-true"  # Lightning's name for FP32 models and optimizers

    def __init__(
        self,
        opt_level: OptLevel = "O1",
        dtype: torch.dtype | HalfName = "float16",
        **settings: Unpack[PluginSettings],
    ) -> None:
        super().__init__()
        options = {"opt_level": opt_level, "dtype": dtype, **settings}
        self._ampatch = IntegrationSession(check_settings(type(self).__name__, options))

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._ampatch.settings.items())
        return f"{type(self).__name__}({options})"

    def main_params(self, optimizer: Any) -> Any:
        """The parameters that the optimizer updates."""
        return ampatch.master_params(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The loss scales."""
        return self._ampatch.scales

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with these loss scales."""
        self._ampatch.scales = state_dict
