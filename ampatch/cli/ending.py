"""How a command ends that cannot go on: quietly, with one line and its exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

INTERRUPTED = 130
READER_ENDED = 141  # 128 and the number of SIGPIPE, as shells count


def end_quietly(command: Callable[[], int], name: str) -> int:
    """`command()`, or the exit code of what ended it; `name` begins the line that says so."""
    try:
        try:
            code = command()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `ampatch tables | head`
        _write_nowhere()
        return READER_ENDED
    except KeyboardInterrupt:
        _end_at_the_next_interrupt()
        print(f"{name}: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if error.filename is None:
            raise
        print(f"{name}: {cause(error)}", file=sys.stderr)
        return 1
    if code == INTERRUPTED:
        _end_at_the_next_interrupt()
    return code


def cause(error: OSError) -> str:
    """The file and what the system says of it; where there is no file, the error's own text."""
    return str(error) if error.filename is None else f"{error.filename}: {error.strerror}."


def _write_nowhere() -> None:
    """What the streams still hold goes nowhere, as Python would complain about it at its end."""
    for stream in (sys.stdout, sys.stderr):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _end_at_the_next_interrupt() -> None:
    """Another Ctrl-C ends the process at once, without a traceback of what runs at its end."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda *signals: os._exit(INTERRUPTED))
