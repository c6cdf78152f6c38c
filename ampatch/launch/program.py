"""The program that a command runs: a script's file, or a module as `python -m` runs it."""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from ampatch.launch.script import Ending, run_module, run_script


class ModuleMissing(ImportError):
    """There is no module of this name to run."""


@dataclass(frozen=True)
class Program:
    """The path of a script or, with `is_module`, the name of a module (as text: `-m name`)."""

    name: str
    is_module: bool = False

    def __str__(self) -> str:
        return f"-m {self.name}" if self.is_module else self.name

    @property
    def title(self) -> str:
        """The name of its results: `train` for `train.py`, `package.train` for a module."""
        return self.name if self.is_module else Path(self.name).stem

    def run(self, arguments: Sequence[str]) -> Ending:
        """Run the program as `__main__` of this process.  Raises the errors of `file`."""
        self.file()
        return (run_module if self.is_module else run_script)(self.name, arguments)

    def file(self) -> Path:
        """The program's file.  Imports nothing.

        Raises `FileNotFoundError` or `ValueError` if the path is not a script, and `ModuleMissing`
        if there is no such module.
        """
        return _file_of_module(self.name) if self.is_module else _file_of_script(self.name)


def _file_of_script(script: str) -> Path:
    path = Path(script)
    if not path.exists():
        raise FileNotFoundError(
            f"{script}: there is no such script.\n"
            f"Expected the path of a Python file, relative to {Path.cwd()}."
        )
    if not path.is_file():
        raise ValueError(f"{script}: not a file.\nExpected the path of a Python file.")
    if path.suffix.lower() == ".ipynb":
        raise ValueError(
            f"{script}: a notebook. Expected the path of a Python file: `jupyter nbconvert --to "
            f"script {shlex.quote(script)}` writes one; delete lines of % and ! from it."
        )
    return path


def _file_of_module(module: str) -> Path:
    first, *rest = module.split(".")
    spec = PathFinder.find_spec(first, [os.getcwd()])
    spec = spec or (importlib.util.find_spec(first) if first else None)
    for end in range(2, len(rest) + 2):
        spec = _spec_in(spec, ".".join([first, *rest][:end]))
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _spec_in(spec, f"{module}.__main__")
    if spec is None or not spec.has_location or spec.origin is None:
        raise ModuleMissing(
            f"-m {module}: there is no such module.\nExpected a module, or a package with a "
            f"__main__, found from {os.getcwd()} or installed, without .py."
        )
    return Path(spec.origin)


def _spec_in(package: ModuleSpec | None, name: str) -> ModuleSpec | None:
    if package is None or package.submodule_search_locations is None:
        return None
    return PathFinder.find_spec(name, package.submodule_search_locations)
