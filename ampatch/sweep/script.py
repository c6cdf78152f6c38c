"""Run a script as `python SCRIPT ARGUMENTS` would, from inside a running process.

`runpy.run_path` is not used: it takes the `__main__` it made away again when
the script ends, and with it the globals that exit handlers and threads of the
script still need.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ending:
    """How a script ended: its exit code and, if an exception ended it, which."""

    exit_code: int
    error: str = ""


def check_script(script: str) -> None:
    """Raise `FileNotFoundError` or `ValueError` unless `script` is a file to run."""
    path = Path(script)
    if not path.exists():
        raise FileNotFoundError(
            f"{script}: there is no such script.\n"
            f"Expected the path of a Python file, seen from {Path.cwd()}."
        )
    if not path.is_file():
        raise ValueError(f"{script}: not a file.\nExpected the path of a Python file.")


def run_script(script: str, arguments: Sequence[str]) -> Ending:
    """Run `script` as `__main__`, and report an exception as Python does."""
    check_script(script)
    main = _become_main(script, arguments)
    install_apex()
    try:
        exec(compile(Path(script).read_bytes(), main.__file__, "exec"), main.__dict__)
    except SystemExit as stop:
        return _exited(stop.code)
    except BaseException as error:  # whatever ends a script is reported, then it has ended
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        trace = _from_script(error.__traceback__)
        # The hook shows what hangs on the exception, not what it is given.
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return Ending(code, describe(error))
    return Ending(0)


def install_apex() -> None:
    """Let `from apex import amp` find ampatch, unless there is an apex to find already."""
    for name in ("ampatch.compat", "ampatch.compat.apex"):
        if importlib.util.find_spec(name) is None:
            return
    if importlib.util.find_spec("apex") is None:
        importlib.import_module("ampatch.compat.apex").install()


def describe(error: BaseException) -> str:
    """Type and message on one line: `ValueError: too many digits`."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    name = type(error).__qualname__
    return f"{name}: {lines[0].strip()}" if lines else name


def _become_main(script: str, arguments: Sequence[str]) -> types.ModuleType:
    """Set `__main__`, `sys.argv` and `sys.path` as they are for a script."""
    main = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(script)  # as Python has it
    main.__builtins__ = __builtins__
    main.__cached__ = None
    sys.modules["__main__"] = main
    sys.argv[:] = [script, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # with -P there is nothing to replace
        sys.path[0] = str(Path(script).resolve().parent)
    package_root = str(Path(__file__).resolve().parents[2])
    if package_root not in sys.path:  # ampatch may have been found through what we replaced
        sys.path.append(package_root)
    return main


def _exited(code: object) -> Ending:
    """What `sys.exit(code)` means, which may be a number, None or a message."""
    if code is None:
        return Ending(0)
    if isinstance(code, int):
        return Ending(code)
    print(code, file=sys.stderr)
    return Ending(1, str(code))


def _from_script(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without our own frames at its top."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
