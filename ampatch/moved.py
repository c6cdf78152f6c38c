"""Old module paths that scripts import or pickles name: until 0.2 they work, with a warning.

A copied hook names `ampatch.hooks`, a saved graph of torch.fx names `ampatch.models.cast_tensors`,
and a script may import `ampatch.training`.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

MODULES = {
    "ampatch.control": "ampatch.api.casting",
    "ampatch.environment": "ampatch.config.environment",
    "ampatch.frontend": "ampatch.api.initialize",
    "ampatch.handle": "ampatch.api.legacy_init",
    "ampatch.hooks": "ampatch.models.hooks",
    "ampatch.opt_levels": "ampatch.config.opt_levels",
    "ampatch.training": "ampatch.api.training",
}
NAMES = {
    ("ampatch.models", "cast_tensors"): "ampatch.models.conversion",
    ("ampatch.session", "Session"): "ampatch.session.session",
}
"""Attributes of modules that are packages now."""


class MovedModules:
    """A finder and loader that answers an import of an old path with the module itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for an old path; None for every other name."""
        if name not in MODULES:
            return None
        return importlib.machinery.ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """A module as Python makes it, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module that has moved in the place of the one that Python made."""
        _warn(module.__name__, MODULES[module.__name__])
        sys.modules[module.__name__] = importlib.import_module(MODULES[module.__name__])


def moved_name(package: str, name: str) -> Any:
    """An attribute that an old module had, for the package's `__getattr__`.

    Raises `AttributeError` for other names.
    """
    home = NAMES.get((package, name))
    if home is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    _warn(f"{package}.{name}", f"{home}.{name}")
    return getattr(importlib.import_module(home), name)


def _warn(old: str, new: str) -> None:
    warnings.warn(
        f"{old} has moved to {new}; the old path works until ampatch 0.2. Public names are those "
        "of `ampatch` itself: import these from there.",
        DeprecationWarning,
        stacklevel=3,
    )


def keep_old_paths() -> None:
    """Have Python find the old paths, after it has looked everywhere else."""
    sys.meta_path.append(MovedModules())
