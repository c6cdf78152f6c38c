"""How many Python functions a call enters."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable


def frames(function: Callable, *args) -> int:
    """Python functions entered by and below `function(*args)`, but for what the collector runs."""
    return frames_of_each(function, [args])[0]


def frames_of_each(function: Callable, calls: list[tuple]) -> list[int]:
    gc.collect()  # replacements of earlier sessions: the patches' weak table hears of each
    gc.disable()
    try:
        return [_entered(function, *args) for args in calls]
    finally:
        gc.enable()


def _entered(function: Callable, *args) -> int:
    entered = 0

    def profile(frame, event, argument):
        nonlocal entered
        entered += event == "call"

    sys.setprofile(profile)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return entered
