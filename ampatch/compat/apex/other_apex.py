"""Another apex on this machine: whether it has an amp, and which of its modules stay importable.

Ours replaces an apex without `apex.amp`: today's apex of NVIDIA, which has only kernels, or a
folder without `__init__.py`, such as an empty git submodule.  Modules and names that ours lacks
still come from the other one: its submodules by the `__path__` of ours, its names by
`OtherModules.attribute`.  The user's own module or package `apex` stays.
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

_INSTALLED = {"site-packages", "dist-packages"}
_NVIDIA_PACKAGES = ("contrib", "multi_tensor_apply", "normalization")
"""Packages in every apex of NVIDIA's."""


@dataclass(frozen=True)
class OtherApex:
    """An apex that is not ours, and the folders of its submodules."""

    path: str
    folders: tuple[str, ...]
    is_namespace: bool  # folders without __init__.py
    has_amp: bool

    @property
    def stays(self) -> bool:
        """Whether ours does not replace it: it has an amp, or it is the user's own."""
        return self.has_amp or self._is_own

    @property
    def _is_own(self) -> bool:
        """Whether it has code, is not installed by pip, and lacks the packages of NVIDIA's."""
        if self.is_namespace or _INSTALLED.intersection(Path(self.path).parts):
            return False
        paths = product(self.folders, _NVIDIA_PACKAGES)
        return not any(os.path.isdir(os.path.join(*path)) for path in paths)

    def message_of_replacement(self) -> str:
        """The log message where ours replaces it."""
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
    """Context manager: the folder of `ampatch apex-path` is not searched."""
    searched = sys.path[:]
    sys.path[:] = [path for path in searched if Path(path).resolve() != _FOLDER]
    try:
        yield
    finally:
        sys.path[:] = searched


def find() -> OtherApex | None:
    """The apex that is, or would be, imported while ours is not installed."""
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
    """Whether `from apex import amp` would find one.  Imports nothing."""
    submodule = PathFinder.find_spec("apex.amp", list(folders)) if folders else None
    if submodule is not None and submodule.origin is not None:
        return True
    if spec.origin is None:
        return False
    get_code = getattr(spec.loader, "get_code", None)
    code = None if get_code is None else get_code("apex")
    return code is None or "amp" in code.co_names  # what cannot be read may have it


class OtherModules:
    """What an apex in `folders` has, for modules of ours with the same names."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = list(folders)
        self._modules: dict[str, ModuleType | None] = {}

    def path(self, name: str) -> list[str]:
        """Where submodules of `name` (such as "apex.contrib") are."""
        paths = [os.path.join(folder, *name.split(".")[1:]) for folder in self.folders]
        return [path for path in paths if os.path.isdir(path)]

    def attribute(self, module: str, name: str) -> Any:
        """The attribute `name` of the other apex's `module`.  Raises `AttributeError`."""
        if name.startswith("__"):  # Python asks for these by itself
            raise AttributeError(name)
        if module not in self._modules:
            self._load(module)
        other = self._modules[module]
        if other is None:
            raise AttributeError(name)
        return getattr(other, name)

    def _load(self, name: str) -> None:
        """Run the other apex's module; ours stays in `sys.modules`."""
        parent = name.rpartition(".")[0]
        folders = self.path(parent) if parent else list(map(os.path.dirname, self.folders))
        spec = PathFinder.find_spec(name, folders)
        if spec is None or spec.origin is None or spec.loader is None:
            self._modules[name] = None
            return
        module = importlib.util.module_from_spec(spec)
        self._modules[name] = module  # for `attribute`, which modules that it imports may need
        try:
            spec.loader.exec_module(module)
        except ImportError as error:  # hasattr() must get an answer
            raise AttributeError(f"{spec.origin} cannot be imported: {error}") from error
