"""Finds the build of the native part that matches this ampatch, torch and Python, and loads it.

A build lies in `CACHE/ampatch/native/TORCH-PYTHON-PLATFORM-HASH/`.  The hash is of the source and
of what tells two builds of one torch version apart.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.machinery
import importlib.util
import pkgutil
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

from ..config import environment
from ..log import logger

NAME = "_ampatch_native"
SOURCE = "native.cpp"
FILE = NAME + importlib.machinery.EXTENSION_SUFFIXES[0]
_BUILD = "run 'ampatch build'"


@dataclasses.dataclass(frozen=True)
class Status:
    """Whether the native part is in force, why in one phrase, and the file that was found."""

    in_force: bool
    reason: str
    path: Path | None = None
    is_fault: bool = False
    """There is a build, and it cannot be used."""


def load() -> tuple[ModuleType | None, Status]:
    """`find`, and one line in the log if that is not what the user expects."""
    part, status = find()
    if status.is_fault or (not status.in_force and _is_asked_for()):
        logger.warning(
            "Native part: %s. ampatch works without it, with the same results.", status.reason
        )
    return part, status


def find() -> tuple[ModuleType | None, Status]:
    """The native part, loaded, or None; and its status."""
    try:
        if environment.native() is False:
            return None, Status(False, "off (AMPATCH_NATIVE=0)")
    except ValueError as error:  # `initialize` raises it
        return None, Status(False, f"off ({error})")
    if is_free_threaded():
        return None, Status(False, "off (this Python has no GIL, on which it relies)")
    try:
        path = built_file()
    except OSError as error:  # an archive of a program may hold its Python files alone
        return None, Status(False, f"off (its source is not installed: {error})")
    if not path.is_file():
        others = _other_builds()
        return None, Status(False, others or f"not built: {_BUILD}", is_fault=bool(others))
    try:
        part = import_file(str(path))
    except Exception as error:
        reason = f"{path} does not load ({error}): run 'ampatch build --force'"
        return None, Status(False, reason, path, is_fault=True)
    return part, Status(True, f"in force ({path})", path)


def _is_asked_for() -> bool:
    try:
        return environment.native() is True
    except ValueError:
        return False


def is_free_threaded() -> bool:
    """Whether this is a build of Python without the GIL: its tag is `cp313t`, or `cpython-313t`."""
    return re.match(r"\.cp(ython-)?\d+d?t", importlib.machinery.EXTENSION_SUFFIXES[0]) is not None


def source() -> bytes:
    """The C++ source."""
    found = pkgutil.get_data(__package__, SOURCE)
    assert found is not None
    return found


def cache() -> Path:
    """The folder of all builds."""
    return Path(environment.cache_folder(), "native")


def built_file() -> Path:
    """Where the build that matches lies, or would lie."""
    return cache() / f"{_versions()}-{_hash()}" / FILE


def _versions() -> str:
    python = sys.implementation.cache_tag
    return f"{torch.__version__}-{python}-{sysconfig.get_platform()}"


def _hash() -> str:
    version = torch.version
    build = [getattr(version, name, None) for name in ("git_version", "debug", "cuda", "hip")]
    abi = torch.compiled_with_cxx11_abi()
    return hashlib.sha256(source() + repr((build, abi)).encode()).hexdigest()[:16]


def _other_builds() -> str:
    """What to say of builds that do not match, or `""` where there is none."""
    found = sorted(path.parent.name for path in cache().glob(f"[!.]*/{NAME}.*"))
    if not found:
        return ""
    ours = _versions()
    if any(name.startswith(f"{ours}-") for name in found):
        return f"stale: built from other source or for another build of torch: {_BUILD}"
    return f"stale: built for {found[-1].rpartition('-')[0]}, this is {ours}: {_BUILD}"


def import_file(path: str) -> ModuleType:
    """The module in the file `path`, in `sys.modules` too, where pickle and Dynamo look."""
    loader = importlib.machinery.ExtensionFileLoader(NAME, path)
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[NAME] = module
    return module
