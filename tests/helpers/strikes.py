"""Ctrl-C at the n-th line or call of ampatch's code: at its worst moments.

Python looks for signals as a Python function begins and between its lines.
"""

import linecache
import re
import sys
from collections.abc import Callable
from pathlib import Path

import ampatch

_NO_SIGNAL = re.compile(r"^\s*try:|lock:")
ROOT = str(Path(ampatch.__file__).parent)


def stop() -> None:
    raise KeyboardInterrupt


def lines(
    does: Callable[[], object],
    files: tuple[str, ...],
    number: int = -1,
    rooms: tuple[str, ...] = (),
    left_out: re.Pattern[str] = _NO_SIGNAL,
    action: Callable[[], object] = stop,
) -> tuple[int, str]:
    """Run, with `action` at the n-th line or call in these files of ampatch, or call in `rooms`.

    Returns how many there are, and where that was.  Left out are lines at which Python handles no
    signal, and which no `with` block covers: `try:` in it, and its own line as it ends.
    """
    paths, seen, where = {str(Path(ROOT, file)) for file in files}, 0, ""
    of_rooms = tuple(str(Path(ROOT, room)) for room in rooms)

    def trace(frame, event, argument):
        nonlocal seen, where
        has_lines = frame.f_code.co_filename in paths
        if not has_lines and not (rooms and frame.f_code.co_filename.startswith(of_rooms)):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "call" or (event == "line" and not left_out.search(line)):
            seen += 1
            if seen == number:
                where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({event})"
                action()
        return trace if has_lines else None

    sys.settrace(trace)
    try:
        does()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return seen, where
