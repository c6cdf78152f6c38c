"""Modules of torch whose functions are replaced, and which may be imported later than ampatch."""

from __future__ import annotations

import sys
from collections.abc import Callable

import wrapt


def is_imported(name: str) -> bool:
    """Whether there is anything to replace yet."""
    return name in sys.modules


def when_imported(name: str, call: Callable[[], None]) -> None:
    """Have `call()` run once the module is imported."""
    wrapt.register_post_import_hook(lambda module: call(), name)
