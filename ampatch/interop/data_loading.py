"""Runs the data preparation of a DataLoader without casts, in this process and in workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..casting.calls import CastState
from ..casting.patches import Patch
from ..torch_private.data_loading import DATA_PREPARATION_FUNCTIONS


def patches(state: CastState) -> list[Patch]:
    """The patches of functions that prepare data.  Managed models still cast in these functions."""
    return [
        (owner, name, lambda fn: _without_casts(fn, state))
        for owner, name in DATA_PREPARATION_FUNCTIONS
    ]


def _without_casts(original: Callable, state: CastState) -> Callable:
    @functools.wraps(original)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        return state.call_without_casts(original, *args, **kwargs)

    return prepare
