"""Run a script or a module as Python would, from inside a running process.

`runpy` is not used: it removes its `__main__` when the script ends, and with it the globals that
exit handlers and threads of the script still need.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import select
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType
from typing import Any

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Ending:
    """How a script ended: its exit code and, after an exception, the type and message."""

    exit_code: int
    error: str = ""


class EnoughSteps(SystemExit):
    """Raised in the script after the last step that the user wants.  The exit code is 0."""

    def __init__(self) -> None:
        super().__init__(0)


def run_script(script: str, arguments: Sequence[str]) -> Ending:
    """Run `script` as `__main__`, and report an exception as Python does.

    Raises `BrokenPipeError` if no process reads the standard output any more.
    """
    _set_path(str(Path(script).resolve().parent))
    sys.argv[:] = [script, *arguments]
    main = _become_main(os.path.abspath(script))  # an absolute path, as in Python
    install_apex()
    return _run(main, lambda: compile(Path(script).read_bytes(), main.__file__, "exec"))


def run_module(module: str, arguments: Sequence[str]) -> Ending:
    """Run a module, or a package's `__main__`, as `python -m` would."""
    _set_path(os.getcwd())
    sys.argv[:] = ["-m", *arguments]  # the value that Python shows to parent packages
    install_apex()
    try:
        spec: Any = importlib.util.find_spec(module)
        if spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
    except BaseException as error:  # a parent package runs code of its own
        return make_ending(error)
    sys.argv[0] = str(spec.origin)
    main = _become_main(spec.origin, spec)
    return _run(main, lambda: spec.loader.get_code(spec.name))


def install_apex() -> None:
    """Make `from apex import amp` find ampatch, unless an apex with an amp is installed."""
    if "apex" not in sys.modules:
        importlib.import_module("ampatch.compat.apex").install_unless_real()


def describe(error: BaseException) -> str:
    """Return the type and message of an exception on one line: `ValueError: too many digits`."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    name = type(error).__qualname__
    return f"{name}: {lines[0].strip()}" if lines else name


def _set_path(folder: str) -> None:
    """Put `folder` where Python puts the folder of a script."""
    if not getattr(sys.flags, "safe_path", False):  # with -P Python puts no folder there
        sys.path[0] = folder
    if PACKAGE_ROOT not in sys.path:  # ampatch may have been found through the replaced entry
        sys.path.append(PACKAGE_ROOT)


def _become_main(file: str | None, spec: ModuleSpec | None = None) -> types.ModuleType:
    """Replace `__main__` by an empty module with the attributes that spawned children read."""
    main = types.ModuleType("__main__")
    main.__file__ = file
    main.__builtins__ = __builtins__
    main.__cached__ = None
    if spec is not None:
        main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
        main.__cached__ = spec.cached
    sys.modules["__main__"] = main
    return main


def _run(main: types.ModuleType, code: Callable[[], CodeType]) -> Ending:
    try:
        exec(code(), main.__dict__)
    except BaseException as error:  # every exception ends the script and is reported
        return make_ending(error)
    return Ending(0)


def make_ending(error: BaseException) -> Ending:
    """Return the ending of a script that raised `error`.  Prints what Python would print."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return Ending(error.code or 0)
        print(error.code, file=sys.stderr)
        return Ending(1, str(error.code))
    if isinstance(error, BrokenPipeError) and _has_lost_its_reader(sys.stdout):
        raise error  # no error of the script: the reader of a pipe has exited, like `head`
    code = 130 if isinstance(error, KeyboardInterrupt) else 1
    trace = _from_script(error.__traceback__)
    # The hook shows the traceback of the exception, not its third argument.
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    return Ending(code, describe(error))


def _has_lost_its_reader(stream: Any) -> bool:
    if not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(stream, 0)
    return bool(poll.poll(0))


def _from_script(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without its first frames, which are of this file and of the import system."""
    while trace is not None and _is_before_script(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_before_script(file: str) -> bool:
    if file in (__file__, importlib.util.__file__, "<frozen zipimport>"):  # frozen from 3.11 on
        return True
    return file.startswith("<frozen importlib")
