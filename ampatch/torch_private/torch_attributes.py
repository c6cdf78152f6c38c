"""The one way to a private name of torch that may not be there."""

from __future__ import annotations

import importlib
from typing import Any


def torch_attribute(name: str, otherwise: Any) -> Any:
    """The object of torch by a name such as "torch._C._is_tracing"; without it, `otherwise`.

    It is looked up once.  Code that reads a changing variable of torch asks torch itself.
    """
    home, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(home)
        if hasattr(module, attribute):
            return getattr(module, attribute)
        # A module that nobody has imported is no attribute of its package.
        return importlib.import_module(name)
    except ImportError:
        return otherwise
