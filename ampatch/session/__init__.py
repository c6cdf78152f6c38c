"""One `initialize`; the only room that knows the operator and the optimizer side."""

from typing import Any

from ..moved import moved_name


def __getattr__(name: str) -> Any:
    return moved_name(__name__, name)
