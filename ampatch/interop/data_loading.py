"""A DataLoader prepares data without casts, in this process and in its workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..casting.calls import CastState
from ..casting.patches import Replacement
from ..torch_private.data_loading import PREPARING


def replacements(state: CastState) -> list[Replacement]:
    """What to replace: a managed model that a dataset calls casts all the same."""
    return [(owner, name, lambda original: _uncast(original, state)) for owner, name in PREPARING]


def _uncast(original: Callable, state: CastState) -> Callable:
    @functools.wraps(original)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        return state.casts_off(original, *args, **kwargs)

    return prepare
