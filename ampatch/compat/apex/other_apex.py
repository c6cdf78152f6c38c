"""Another apex on this machine: whether it has an amp, and which of its modules stay importable.

ampatch's apex replaces an apex without `apex.amp`: today's apex of NVIDIA, which has only kernels,
or a folder without `__init__.py`, such as an empty git submodule.  Modules and names that ampatch's
lacks still come from the other apex: submodules by `__path__`, names by `OtherModules.attribute`.
The user's own module or package `apex` is not replaced.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

_INSTALL_FOLDERS = {"site-packages", "dist-packages"}
_NVIDIA_PACKAGES = ("contrib", "multi_tensor_apply", "normalization")
"""Packages that every apex of NVIDIA has."""


@dataclass(frozen=True)
class OtherApex:
    """An apex that is not ampatch's, and the folders of its submodules."""

    path: str
    folders: tuple[str, ...]
    is_namespace: bool  # folders without __init__.py
    has_amp: bool

    @property
    def has_precedence(self) -> bool:
        """Whether this apex stays importable, because it has an amp or is the user's own."""
        return self.has_amp or self._is_own

    @property
    def _is_own(self) -> bool:
        """Whether it is the user's code: not installed by pip, without NVIDIA's packages."""
        if self.is_namespace or _INSTALL_FOLDERS.intersection(Path(self.path).parts):
            return False
        paths = product(self.folders, _NVIDIA_PACKAGES)
        return not any(os.path.isdir(os.path.join(*path)) for path in paths)

    def message_of_replacement(self) -> str:
        """The log message if ampatch's apex replaces this apex."""
        if self.is_namespace:
            return (
                f"ampatch's apex takes the place of {self.path}, which has no __init__.py and no "
                "amp (a git submodule that was not fetched?)."
            )
        return (
            f"ampatch's apex takes the place of {self.path}, which has no amp. What ampatch's "
            "lacks, such as kernels in apex.contrib, is still imported from there."
        )


_FOLDER = Path(__file__).resolve().parents[1] / "apex_path"


@contextlib.contextmanager
def without_folder() -> Iterator[None]:
    """Context manager that takes the folder of `ampatch apex-path` out of `sys.path`."""
    original_path = sys.path[:]
    sys.path[:] = [path for path in original_path if Path(path).resolve() != _FOLDER]
    try:
        yield
    finally:
        sys.path[:] = original_path


def find_other_apex() -> OtherApex | None:
    """The apex that `import apex` finds while ampatch's is not installed, or None."""
    loaded = sys.modules.get("apex")
    with without_folder():
        spec = importlib.util.find_spec("apex") if loaded is None else loaded.__spec__
    if spec is None:
        return None
    folders = tuple(spec.submodule_search_locations or ())
    is_namespace = spec.origin is None
    path = ", ".join(folders) if is_namespace else str(spec.origin)
    return OtherApex(path, folders, is_namespace, _has_amp(spec, folders))


def _has_amp(spec: ModuleSpec, folders: Sequence[str]) -> bool:
    """Whether `from apex import amp` would find an amp.  Imports nothing."""
    submodule = PathFinder.find_spec("apex.amp", list(folders)) if folders else None
    if submodule is not None and submodule.origin is not None:
        return True
    if spec.origin is None:
        return False
    get_code = getattr(spec.loader, "get_code", None)
    code = None if get_code is None else get_code("apex")
    return code is None or "amp" in code.co_names  # unreadable code may have an amp


class OtherModules:
    """The modules of an apex in `folders`, to complete ampatch's modules of the same names."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = list(folders)
        self._modules: dict[str, ModuleType | None] = {}

    def path(self, name: str) -> list[str]:
        """The folders with submodules of `name` (such as "apex.contrib")."""
        paths = [os.path.join(folder, *name.split(".")[1:]) for folder in self.folders]
        return [path for path in paths if os.path.isdir(path)]

    def attribute(self, module: str, name: str) -> Any:
        """The attribute `name` of the other apex's `module`.  Raises `AttributeError`."""
        if name.startswith("__"):  # Python itself looks these up
            raise AttributeError(name)
        if module not in self._modules:
            self._load(module)
        other = self._modules[module]
        if other is None:
            raise AttributeError(name)
        return getattr(other, name)

    def _load(self, name: str) -> None:
        """Run the other apex's module.  `sys.modules` keeps ampatch's."""
        parent = name.rpartition(".")[0]
        folders = self.path(parent) if parent else list(map(os.path.dirname, self.folders))
        spec = PathFinder.find_spec(name, folders)
        if spec is None or spec.origin is None or spec.loader is None:
            self._modules[name] = None
            return
        module = importlib.util.module_from_spec(spec)
        self._modules[name] = module  # modules that it imports may look up its attributes
        try:
            spec.loader.exec_module(module)
        except ImportError as error:  # so that hasattr() returns False
            raise AttributeError(f"{spec.origin} cannot be imported: {error}") from error
