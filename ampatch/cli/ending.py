"""A command that is interrupted or cannot write ends with one line and its own exit code."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

INTERRUPTED = 130
TERMINATED = 143  # 128 and the number of SIGTERM
READER_ENDED = 141  # 128 and the number of SIGPIPE, as shells count


def end_quietly(command: Callable[[], int], name: str) -> int:
    """Run a command and return its exit code; how it ended is one line that begins with `name`."""
    try:
        try:
            code = command()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `ampatch tables | head`
        _discard_output()
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
    if code in (INTERRUPTED, TERMINATED):
        _end_at_the_next_interrupt()
    return code


class Terminated(KeyboardInterrupt):
    """Raised by SIGTERM, which a scheduler sends when a job's time is up."""


@contextlib.contextmanager
def allow_interrupts() -> Iterator[None]:
    """Context manager in which SIGTERM raises `Terminated`."""

    def end(number: int, frame: object) -> None:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def interrupt_message(error: KeyboardInterrupt, directory: Path) -> tuple[str, int]:
    """The message at the end of a command that can be resumed in `directory`, and its exit code."""
    is_term = isinstance(error, Terminated)
    ending = "Ended by SIGTERM" if is_term else "Interrupted"
    code = TERMINATED if is_term else INTERRUPTED
    return f"{ending}. To go on: {resume_command(directory)}", code


def resume_command(directory: Path) -> str:
    """The command line of this process, changed so that it resumes in `directory`."""
    words = sys.orig_argv
    cut = words.index("--") if "--" in words else len(words)
    kept = [word for word in words[:cut] if word not in ("--resume", "--overwrite")]
    named = any(word.partition("=")[0] == "--out" for word in kept)
    out = [] if named else ["--out", str(directory)]
    return shlex.join([*kept, "--resume", *out, *words[cut:]])


def cause(error: OSError) -> str:
    """The file and the reason of an error, or its own text if it names no file."""
    return str(error) if error.filename is None else f"{error.filename}: {error.strerror}."


def _discard_output() -> None:
    """Drop unwritten output; otherwise Python reports an error when the process ends."""
    for stream in (sys.stdout, sys.stderr):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)


def _end_at_the_next_interrupt() -> None:
    """Let another Ctrl-C end the process at once, without tracebacks of exit handlers."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda *signals: os._exit(INTERRUPTED))
