"""The process that trials are forked from; `warm_starts.py` starts it, and sends the imports.

    python -m ampatch.sweep.execution.fork_server PIPE

It only imports, so a forked trial differs from one that starts cold only in `sys.modules`.
`import_modules` reports imports for which this is not true.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import torch

from ampatch.sweep.execution import child, seeding
from ampatch.torch_private.devices import is_lost_by_fork


def main(argv: Sequence[str]) -> int:
    """Fork trials until the sweep has ended; in a forked process, run the trial.

    Returns the exit status of the trial.
    """
    pipe = Connection(int(argv[0]))
    environment_before = dict(os.environ)
    seeding.seed_everything(0)
    cold_start_reason = import_modules(**pipe.recv())
    drawn = seeding.count_random_draws()
    if drawn is None and not cold_start_reason:
        cold_start_reason = "an import draws random numbers"
    pipe.send(cold_start_reason)
    set_by_imports = child.changed_variables(environment_before)
    while True:
        try:
            request, environment = pipe.recv()
        except EOFError:
            os._exit(0)  # without exit handlers of libraries
        log, guard = recv_handle(pipe), recv_handle(pipe)
        if os.fork() == 0:
            break
        os.close(log)
        os.close(guard)
        pipe.send(os.waitstatus_to_exitcode(os.wait()[1]))
    os.setsid()
    pipe.send(os.getpid())
    pipe.close()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update({**environment, **set_by_imports})
    return child.run({**request, "guard": guard, "drawn": drawn})


def import_modules(modules: Sequence[str], variables: Mapping[str, str]) -> str:
    """Import these modules; returns why a forked process would differ from a cold one, or "".

    `variables` are the environment variables that a cold run had set when it ended.
    """
    environment_before, modules_before = dict(os.environ), set(sys.modules)
    apex_imports = _ApexImportRecorder()
    sys.meta_path.insert(0, apex_imports)
    current_folder = [] if getattr(sys.flags, "safe_path", False) else [sys.path.pop(0)]
    for name in modules:
        _import(name)
    sys.path[:0] = current_folder
    sys.meta_path.remove(apex_imports)
    by_imports = child.changed_variables(environment_before)
    by_script = [name for name in variables if by_imports.get(name) != variables[name]]
    if by_script:
        return f"{by_script[0]} is set in the script, and may be read at an import after that"
    new_modules = (sys.modules[name] for name in sys.modules.keys() - modules_before)
    attributes = (value for module in new_modules for value in vars(module).values())
    defined_in = (str(getattr(value, "__module__", None)) for value in attributes)
    if apex_imports.has_any or any(module.startswith("ampatch.") for module in defined_in):
        return "a library imports ampatch or apex, which the trials change"
    return "" if _survives_fork() else "an import has touched a device, or started a thread"


class _ApexImportRecorder:
    """A finder that finds nothing, and records whether a library imports apex.

    In a trial `apex` is ampatch's.
    """

    has_any = False

    def find_spec(self, name: str, *_: Any) -> None:
        self.has_any |= name.partition(".")[0] == "apex"


def _import(name: str) -> None:
    """Import a module; if it raises, remove what it has imported."""
    modules_before = set(sys.modules)
    try:
        importlib.import_module(name)
    except (Exception, SystemExit):
        for imported in sys.modules.keys() - modules_before:
            del sys.modules[imported]


def _survives_fork() -> bool:
    """Whether a fork of this process is complete: it has no other thread, and can use devices."""
    pid = os.fork()
    if pid == 0:
        os._exit(is_lost_by_fork())
    is_lost = os.waitpid(pid, 0)[1] or torch.cuda.is_initialized()
    # Threads that a library ends before a fork do not count; OpenBLAS does this.
    return not is_lost and len(os.listdir("/proc/self/task")) == threading.active_count() == 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
