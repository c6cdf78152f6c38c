"""Builds the native part before a script starts, where there is a compiler and no build."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from ampatch.errors import AmpatchError

_SECONDS = 300  # for a build, or for the process that makes it already
_USUAL = 30


def build() -> bool:
    """Whether there is a build now that this process has not loaded.

    One line on the standard error says what came of it, if anything was tried.  Processes that
    begin at once build once: the others wait.
    """
    from ampatch import native

    if not native.status().is_to_build or native.missing() is not None:
        return False
    from ampatch.native import building

    line, failed = _Line(), ""
    try:
        building.build(again=False, watch=line.look)
    except AmpatchError as error:
        failed = str(error).splitlines()[0].removeprefix("ampatch build: ")
        native.note_failure(failed)
    finally:
        line.clear()
    if failed:
        line.say(
            f"ampatch: no native part: {failed} The run goes on in Python, with the same results; "
            "AMPATCH_NATIVE=0 does not try."
        )
    elif line.is_begun:
        line.say(
            f"ampatch: native part built in {line.seconds():.0f} s, for all runs from now on "
            "(AMPATCH_NATIVE=0 runs without it)."
        )
    return not failed


def may_restart(given: Sequence[str]) -> bool:
    """Whether this process is the command of these arguments, and not a program that calls it."""
    return bool(sys.executable and given) and sys.orig_argv[-len(given) :] == list(given)


def restart() -> int:
    """Start the command of this process again: `import ampatch` finds the build then."""
    command = [sys.executable, *sys.orig_argv[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name != "posix":  # there `exec` leaves the console to others while the script runs
        return subprocess.call(command)
    os.execv(command[0], command)


class _Line:
    """One line of rank 0 on the standard error; on a terminal it counts seconds meanwhile."""

    def __init__(self) -> None:
        self.is_begun = False
        self._start = time.monotonic()
        self._is_said = os.environ.get("RANK", "0") == "0"
        self._drawn = ""

    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def look(self) -> None:
        """Time goes by; `AmpatchError` if there is none left."""
        seconds = self.seconds()
        if seconds > _SECONDS:
            raise AmpatchError(f"it was not built within {_SECONDS} s: ampatch build has no limit.")
        self.is_begun = True
        text = f"ampatch: compiling the native part, {seconds:.0f} s of about {_USUAL}"
        if text != self._drawn and self._is_said and sys.stderr.isatty():
            self._drawn = text
            print(f"\r{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """What was drawn goes."""
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """The line."""
        if self._is_said:
            print(text, file=sys.stderr, flush=True)
