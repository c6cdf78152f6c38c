"""Who called a module whose hook runs, and whether that call is still running."""

from __future__ import annotations

import sys
from types import FrameType

_OURS = __name__.partition(".")[0] + "."


def calling_frame() -> FrameType | None:
    """The innermost Python frame that is not of ampatch: while a hook runs, the module's call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    return frame


def is_running(frame: FrameType | None) -> bool:
    """Whether a frame is on the stack of this thread."""
    now: FrameType | None = sys._getframe(1)
    while now is not None and now is not frame:
        now = now.f_back
    return now is not None
