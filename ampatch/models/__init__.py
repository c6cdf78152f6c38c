"""A model under an opt level: its conversion, hooks, copies and state dicts."""

from typing import Any

from ..moved import moved_name


def __getattr__(name: str) -> Any:
    return moved_name(__name__, name)
