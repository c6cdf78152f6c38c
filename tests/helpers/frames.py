"""Which Python functions a call enters, and how many."""

import gc
import sys
from collections.abc import Callable
from types import CodeType


def entered(function: Callable, *args: object) -> list[CodeType]:
    """Of each function entered by and below `function(*args)`, but for what the collector runs."""
    codes: list[CodeType] = []
    gc.collect()  # replacements of earlier sessions: the patches' weak table hears of each
    gc.disable()
    sys.setprofile(lambda frame, event, _: event == "call" and codes.append(frame.f_code))
    try:
        function(*args)
    finally:
        sys.setprofile(None)
        gc.enable()
    return codes


def frames(function: Callable, *args: object) -> int:
    return len(entered(function, *args))
