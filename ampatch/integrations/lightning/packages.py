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
    """The two modules of one of them."""

    trainer: Any
    fabric: Any


def installed() -> list[Package]:
    """The packages that are installed.  Raises `ImportError` if there is none."""
    found = [
        Package(importlib.import_module(trainer), importlib.import_module(fabric))
        for name, trainer, fabric in (
            ("lightning", "lightning.pytorch", "lightning.fabric"),
            ("pytorch_lightning", "pytorch_lightning", "lightning_fabric"),
        )
        if importlib.util.find_spec(name) is not None
    ]
    if not found:
        raise ImportError(
            "ampatch.integrations.lightning: neither lightning nor pytorch_lightning is "
            'installed. Install one, version 2.2 or newer: pip install "ampatch[lightning]".'
        )
    return found


PACKAGES = installed()
