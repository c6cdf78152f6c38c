"""Python processes for tests, forked from one process that has imported torch.

`python("-m", "ampatch", "run", "train.py")` is a process as a shell starts it: arguments, working
directory, variables, `sys.path`, `__main__`, streams, exit status and what runs at exit are its
own.  But torch is imported already, because importing it takes longer than most tests, and
Dynamo, which torch imports with the first optimizer; and no module is taken apart at the end.  A
test of the start or the end of the interpreter, or of what is imported when, starts a process
with `subprocess`.
"""

import atexit
import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from warm_server import REQUEST_BYTES

import ampatch
from ampatch.config.environment import PROCESS_VARIABLES


class Process:
    """A started process, with what `subprocess.Popen` offers of one: `returncode` and the like."""

    def __init__(self, answers: socket.socket) -> None:
        self._answers = answers
        self.pid = int(answers.recv(64))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, negative for a signal; `TimeoutExpired` if the process runs longer."""
        if self.returncode is None:
            self._answers.settimeout(timeout)
            try:
                self.returncode = int(self._answers.recv(64))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0) from None
            self._answers.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit status, or None while the process runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


_lock = threading.Lock()


@functools.cache
def _requests() -> socket.socket:
    """The way to the process that has torch imported; it is started at the first request."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
    code += f"import warm_server; warm_server.serve({theirs.fileno()})"
    process = subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
    )
    theirs.close()

    def stop() -> None:
        ours.close()
        process.wait()

    atexit.register(stop)
    return ours


def environment(**variables: str) -> dict[str, str]:
    """The variables of this process, with ampatch found from any directory.

    Of the variables of ampatch those that decide about the native part stay; others are set only
    if they are in `variables`.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in PROCESS_VARIABLES or not name.startswith("AMPATCH_")
    }
    places = [str(Path(ampatch.__file__).parents[1]), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(places), "COLUMNS": "160", **variables}


def start(
    *arguments: object,
    cwd: object = None,
    env: dict[str, str] | None = None,
    stdin: int,
    stdout: int,
    stderr: int,
    pass_fds: tuple[int, ...] = (),
    start_new_session: bool = False,
) -> Process:
    """A Python with these arguments: `-W FILTER`, then `-m MODULE`, `-c CODE` or `SCRIPT`.

    `env` is `environment()` unless given; `stdin`, `stdout` and `stderr` are file descriptors.
    """
    request = {
        "arguments": [str(argument) for argument in arguments],
        "cwd": str(cwd or os.getcwd()),
        "env": environment() if env is None else env,
        "descriptors": (0, 1, 2, *pass_fds),
        "new_session": start_new_session,
    }
    message = pickle.dumps(request)
    assert len(message) < REQUEST_BYTES
    with _lock:
        requests = _requests()
    ours, theirs = socket.socketpair()
    socket.send_fds(requests, [message], [theirs.fileno(), stdin, stdout, stderr, *pass_fds])
    theirs.close()
    return Process(ours)


def popen(command: list[str], **options: Any) -> Any:
    """`subprocess.Popen` that forks the trials of sweeps, and starts what else there is.

    It takes what a sweep gives for its trials: streams are open files or `DEVNULL`, and errors go
    where the output goes.
    """
    if command[:2] != [sys.executable, "-m"] or "sweep" not in command[2]:
        return _Popen(command, **options)
    assert options.pop("stdin") is subprocess.DEVNULL
    assert options.pop("stderr") is subprocess.STDOUT
    output = options.pop("stdout").fileno()
    with open(os.devnull) as nothing:
        streams = {"stdin": nothing.fileno(), "stdout": output, "stderr": output}
        return start(*command[1:], **streams, **options)


_Popen = subprocess.Popen


def python(
    *arguments: object,
    cwd: object = None,
    env: dict[str, str] | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess:
    """The end of such a process, with what it wrote as text."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with open(os.devnull) as nothing:
            streams = {"stdin": nothing.fileno(), "stdout": out.fileno(), "stderr": err.fileno()}
            process = start(*arguments, cwd=cwd, env=env, **streams)
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                raise
        written = [_text_of(file) for file in (out, err)]
    return subprocess.CompletedProcess([sys.executable, *arguments], status, *written)


def _text_of(file: Any) -> str:
    file.seek(0)
    return file.read().decode().replace("\r\n", "\n")
