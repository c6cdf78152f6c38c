"""Builds the native part before a script starts, if there is a compiler and no build."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from ampatch.errors import AmpatchError

INTERVAL = 20.0  # seconds between lines during the compilation


def build() -> bool:
    """Build if there is no build.  Returns whether this process has to restart to load it.

    Two lines on the standard error announce the build and its result.  If several processes start
    together, one builds and the others wait.
    """
    from ampatch import native

    if not native.status().is_to_build or native.missing() is not None:
        return False
    from ampatch.native import building

    start = time.monotonic()
    _say("compiling the native part, about 30 s, for all runs from now on")
    try:
        with progress_lines():
            building.build(again=False)
    except AmpatchError as error:
        reason = str(error).splitlines()[0].removeprefix("ampatch build: ")
        native.record_failure(reason)
        _say(
            f"no native part: {reason} The run goes on in Python, with the same results; "
            "AMPATCH_NATIVE=0 leaves the attempt out."
        )
        return False
    seconds = time.monotonic() - start
    _say(f"native part built in {seconds:.0f} s (AMPATCH_NATIVE=0 runs without it).")
    return True


@contextlib.contextmanager
def progress_lines() -> Iterator[None]:
    """Context manager that prints a line every `INTERVAL` seconds while a build compiles."""
    start, is_over = time.monotonic(), threading.Event()

    def tell() -> None:
        while not is_over.wait(INTERVAL):
            _say(f"still compiling, {time.monotonic() - start:.0f} s so far")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _say(text: str) -> None:
    """Print a line on the standard error, in rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"ampatch: {text}", file=sys.stderr, flush=True)


def may_restart(words: Sequence[str]) -> bool:
    """Whether this process is the command, not a program that calls `main`."""
    return bool(sys.executable and words) and sys.orig_argv[-len(words) :] == list(words)


def restart() -> int:
    """Start the command of this process again, so that `import ampatch` finds the build."""
    command = [sys.executable, *sys.orig_argv[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name != "posix":  # on Windows `exec` would return to the console while the script runs
        return subprocess.call(command)
    os.execv(command[0], command)
