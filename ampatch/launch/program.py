"""What a command runs: a script's file, or a module as by `python -m`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from ampatch.launch.script import Ending, ModuleMissing, check_script, run_module, run_script


@dataclass(frozen=True)
class Program:
    """The path of a script or, with `is_module`, the name of a module; as text, `-m name`."""

    name: str
    is_module: bool = False

    def __str__(self) -> str:
        return " ".join(self.words)

    @property
    def title(self) -> str:
        """A name for its results: `train` of `train.py`, `package.train` of a module."""
        return self.name if self.is_module else Path(self.name).stem

    @property
    def words(self) -> list[str]:
        """As a command line has it."""
        return ["-m", self.name] if self.is_module else [self.name]

    def run(self, arguments: Sequence[str]) -> Ending:
        """Run it as `__main__` of this process.  Raises `ModuleMissing` for no module."""
        return (run_module if self.is_module else run_script)(self.name, arguments)

    def file(self) -> Path:
        """Its file.  Imports nothing.

        Raises `FileNotFoundError` or `ValueError` for no script, `ModuleMissing` for no module.
        """
        if self.is_module:
            return _file_of_module(self.name)
        check_script(self.name)
        return Path(self.name)


def _file_of_module(module: str) -> Path:
    spec = _spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = PathFinder.find_spec(f"{module}.__main__", spec.submodule_search_locations)
    if spec is None or not spec.has_location or spec.origin is None:
        raise ModuleMissing(
            f"-m {module}: there is no such module.\nExpected a module, or a package with a "
            f"__main__, found from {os.getcwd()} or installed, without .py."
        )
    return Path(spec.origin)


def _spec(module: str) -> ModuleSpec | None:
    first, *rest = module.split(".")
    spec = PathFinder.find_spec(first, [os.getcwd()])
    spec = spec or (importlib.util.find_spec(first) if first else None)
    name = first
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec
