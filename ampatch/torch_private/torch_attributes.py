"""Finds private names of torch, which a version may lack."""

from __future__ import annotations

import importlib
from typing import Any


def torch_attribute(name: str, fallback: Any) -> Any:
    """Return the object of torch with a name such as "torch._C._is_tracing", or `fallback`.

    To be called at import.  Code that needs a variable's present value reads it from torch itself.
    """
    home, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(home)
        if hasattr(module, attribute):
            return getattr(module, attribute)
        # A module that has not been imported is not an attribute of its package.
        return importlib.import_module(name)
    except ImportError:
        return fallback
