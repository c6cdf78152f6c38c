"""Commands of ampatch for the tests of them: in a process of their own, and in this one."""

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from warm_python import environment, python

import ampatch
from ampatch.cli import main
from ampatch.config.environment import VARIABLES


def ampatch_run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return python("-m", "ampatch", "run", *arguments, cwd=folder, env=environment(**variables))


def commands_here(
    tmp_path: Path, monkeypatch: Any, capfd: Any
) -> Iterator[Callable[..., subprocess.CompletedProcess]]:
    """For the fixture: `here("run", "train.py")` is `ampatch run train.py` in this process.

    What the command and its script set is undone.  No apex is installed, and processes that the
    script spawns are not set up.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr("ampatch.launch.script.install_apex", lambda: None)
    monkeypatch.setattr("ampatch.launch.children.start", lambda is_auto, spawned: None)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # as if it were not set; the command may set it
    known = set(sys.modules)

    def run(*arguments: object) -> subprocess.CompletedProcess:
        words = [str(argument) for argument in arguments]
        ampatch.deactivate()  # what the script before has left open
        try:
            code = main.main(words)
        except SystemExit as stop:
            code = stop.code
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    yield run
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path
