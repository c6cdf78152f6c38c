"""Trials that start warm: a server process imports what the script imports, and forks each trial.

The first cold run lists its imports, and the server (`fork_server.py`) imports them before the next
trial.  If the server finds that a fork would differ from a cold start, all trials start cold.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Pipe
from multiprocessing.reduction import send_handle
from typing import Any

IS_POSSIBLE = sys.platform == "linux"  # elsewhere libraries of the system do not survive a fork
POLL = 0.1  # seconds between two looks at a child
SERVER = "ampatch.sweep.execution.fork_server"


class WarmStarts:
    """The server of one sweep, whose trials run one at a time."""

    def __init__(self) -> None:
        self._imports: dict[str, Any] | None = None
        self._server: Any = None
        self._pipe: Any = None

    @property
    def needs_imports(self) -> bool:
        """Whether a cold run is to list its imports."""
        return IS_POSSIBLE and self._imports is None

    def store_imports(self, imports: dict[str, Any] | None) -> None:
        """Store the imports of the first cold run, and the variables that it has set."""
        self._imports = self._imports or imports

    def start(
        self, request: dict[str, Any], environment: Mapping[str, str], descriptors: Sequence[int],
        check: Callable[[], None],
    ) -> ForkedTrial | None:  # fmt: skip
        """Fork a trial from the server; returns None if the trial has to start cold.

        `descriptors` are those of its log and of its guard pipe.  `check` is called repeatedly
        while the server imports, and may raise.
        """
        if self._imports is None:
            return None
        try:
            if self._server is None:
                self._start_server(environment, check)
            if self._pipe is None:
                return None
            self._pipe.send((request, environment))
            for descriptor in descriptors:
                send_handle(self._pipe, descriptor, self._server.pid)
            return ForkedTrial(self._pipe)
        except (EOFError, OSError):  # the server is gone
            self._pipe = None
            return None

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    def _start_server(self, environment: Mapping[str, str], check: Callable[[], None]) -> None:
        pipe, server_end = Pipe()
        command = [sys.executable, "-m", SERVER, str(server_end.fileno())]
        with server_end:
            self._server = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, env=environment,
                start_new_session=True,  # so that Ctrl-C reaches only the sweep
                pass_fds=[server_end.fileno()],
            )  # fmt: skip
        pipe.send(self._imports)
        while not pipe.poll(POLL):
            check()
        self._pipe = pipe if pipe.recv() == "" else None


class ForkedTrial:
    """A forked trial, with the methods of `subprocess.Popen` that a `Runner` uses."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self.pid: int = pipe.recv()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal, or None while the process runs."""
        return self.wait() if self.returncode is None and self._pipe.poll() else self.returncode

    def wait(self) -> int:
        """The exit status, when the process has ended."""
        if self.returncode is None:
            try:
                self.returncode = int(self._pipe.recv())
            except (EOFError, OSError):  # the server is gone
                self.returncode = -signal.SIGKILL
                self.send_signal(signal.SIGKILL)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process and to all that it has started."""
        os.killpg(self.pid, number)
