"""An exception at the n-th call that code of ampatch makes or gets: Ctrl-C, at its worst moments.

Python looks for signals as a Python function begins and as a C function returns.
"""

import linecache
import re
import sys
from collections.abc import Callable
from pathlib import Path

import ampatch

_NO_SIGNAL = re.compile(r"^\s*try:|lock:")
ROOT = str(Path(ampatch.__file__).parent)


def calls(does: Callable[[], object], room: str = "") -> int:
    """How many moments there are in a run: in all of ampatch, or in one room."""
    return _run(does, -1, room)[0]


def stop() -> None:
    raise KeyboardInterrupt


def strike(
    does: Callable[[], object], number: int, room: str = "", action: Callable[[], object] = stop
) -> str:
    """Run, with that action at that moment; returns where that is."""
    return _run(does, number, room, action)[1]


def _run(
    does: Callable[[], object], number: int, room: str, action: Callable[[], object] = stop
) -> tuple[int, str]:
    seen, where = 0, ""
    files = str(Path(ROOT, room))

    def profile(frame, event, argument):
        nonlocal seen, where
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(files):
            return
        seen += 1
        if seen == number:
            what = "at its start" if event == "call" else f"after {argument.__name__}"
            code = frame.f_code
            where = f"{code.co_filename[len(ROOT) :]}:{frame.f_lineno} {code.co_name} {what}"
            action()

    sys.setprofile(profile)
    try:
        does()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return seen, where


def lines(
    does: Callable[[], object],
    files: tuple[str, ...],
    number: int = -1,
    rooms: tuple[str, ...] = (),
    left_out: re.Pattern[str] = _NO_SIGNAL,
) -> tuple[int, str]:
    """Run, with Ctrl-C at the n-th line or call within these files of ampatch, or call in `rooms`.

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
                stop()
        return trace if has_lines else None

    sys.settrace(trace)
    try:
        does()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return seen, where
