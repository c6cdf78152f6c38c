"""The process with torch imported that forks others: see `warm_python`."""

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import io
import os
import pickle
import runpy
import signal
import socket
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import Any, NoReturn

REQUEST_BYTES = 1 << 17  # what one packet of a Unix socket surely holds


def serve(channel: int) -> None:
    """Fork a process for each request that comes through `channel`, until it is closed."""
    import torch
    import torch._dynamo  # noqa: F401  (torch imports it with the first optimizer)

    sys.path[:] = _without_python_path(sys.path[2:])
    gc.freeze()  # what is shared with the forked processes stays shared
    requests = socket.socket(fileno=channel)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES, 8)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            _run_and_report(pickle.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _run_and_report(request: dict[str, Any], answers: int, *descriptors: int) -> NoReturn:
    """Be the process that was asked for, and the one that tells its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(answers)
        _become(request, descriptors)
        _leave(_status_of(request["arguments"]))
    for descriptor in descriptors:
        os.close(descriptor)
    os.write(answers, f"{pid}".encode().ljust(64))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        os.write(answers, f"{status}".encode().ljust(64))
    os._exit(0)


def _without_python_path(path: list[str]) -> list[str]:
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [place for place in path if place not in places]


def _become(request: dict[str, Any], descriptors: tuple[int, ...]) -> None:
    """Working directory, variables, search path and files of a process of its own."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ours may be ignored, by a shell
    if request["new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:0] = filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))
    _move(descriptors, request["descriptors"])
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        stream = _text_stream(number)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()


def _text_stream(number: int) -> io.TextIOWrapper:
    """What Python makes of that file descriptor at its start."""
    if number == 0:
        return open(number, closefd=False)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    file: Any = open(number, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    at_once = number == 2 or file.isatty()
    return io.TextIOWrapper(file, line_buffering=at_once, write_through=unbuffered)


def _move(descriptors: tuple[int, ...], numbers: tuple[int, ...]) -> None:
    """Give each file descriptor its number; first out of the way, where no number is."""
    free = max(*numbers, *descriptors) + 1
    away = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, free) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for first, number in zip(away, numbers):
        os.dup2(first, number)
        os.close(first)


def _status_of(arguments: list[str]) -> int:
    """The exit status of the program, as the interpreter takes it from `SystemExit`."""
    try:
        _execute(arguments)
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code & 0xFF
        if end.code is not None:
            print(end.code, file=sys.stderr)
            return 1
    return 0


def _leave(status: int) -> NoReturn:
    """End as the interpreter does, but take no module apart: that writes to all shared memory.

    So what a file still open has not written yet is lost.
    """
    _finish()
    os._exit(status)


def _finish() -> None:
    """Wait for threads, run what is to run at exit, and write what is still to be written."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def _execute(arguments: list[str]) -> None:
    del sys.modules["warm_server"]
    while arguments[0] == "-W":
        sys.warnoptions.append(arguments[1])
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        arguments = arguments[2:]
    try:
        _execute_main(*arguments)
    except (Exception, KeyboardInterrupt) as error:
        error.__traceback__ = _without_these_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        if type(error) is KeyboardInterrupt:
            _finish()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)


def _execute_main(first: str, *rest: str) -> None:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    if first == "-m":
        sys.argv[:] = ["-m", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif first == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = [first, *rest]
        sys.path.insert(0, os.path.dirname(os.path.realpath(first)))
        main.__file__ = os.path.abspath(first)
        exec(compile(Path(first).read_bytes(), main.__file__, "exec"), main.__dict__)


def _without_these_frames(frames: types.TracebackType | None) -> types.TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames
