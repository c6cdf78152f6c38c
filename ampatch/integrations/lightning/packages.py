"""Lightning's packages that are installed, and their base classes.

`lightning` and `pytorch_lightning` are the same code under two names, with separate classes: each
Trainer takes plugins of its own package only.  A class that derives from the bases of both fits
either.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, NamedTuple


class Package(NamedTuple):
    """What the plugins use of one of the two."""

    precision: Any  # the base class of the Trainer's plugins
    module: Any  # LightningModule
    fabric_precision: Any  # the base class of Fabric's plugins
    fabric: Any  # Fabric


_NAMES = (
    ("lightning", "lightning.pytorch", "lightning.fabric"),
    ("pytorch_lightning", "pytorch_lightning", "lightning_fabric"),
)


def installed() -> list[Package]:
    """The packages that are installed.  Raises `ImportError` if there is none."""
    found = [
        _package(importlib.import_module(trainer), importlib.import_module(fabric))
        for name, trainer, fabric in _NAMES
        if importlib.util.find_spec(name) is not None
    ]
    if not found:
        raise ImportError(
            "ampatch.integrations.lightning: neither lightning nor pytorch_lightning is "
            'installed. Install one, version 2.2 or newer: pip install "ampatch[lightning]".'
        )
    return found


def _package(trainer: Any, fabric: Any) -> Package:
    return Package(
        precision=trainer.plugins.Precision,
        module=trainer.LightningModule,
        fabric_precision=fabric.plugins.Precision,
        fabric=fabric.Fabric,
    )


PACKAGES = installed()
