"""Finds the build of the native part that matches this ampatch, torch and Python, and loads it.

A build is one file in `CACHE/ampatch/native/`, whose name says what it fits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.machinery
import importlib.util
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

from ..config import environment
from ..log import logger

NAME = "_ampatch_native"
SOURCES = ("native.cpp", "call.h", "copies.h", "gradients.h", "weights.h")
"""The first one is compiled, and includes the others."""


@dataclasses.dataclass(frozen=True)
class Status:
    """Whether the native part is active, why in one phrase, and the file of the build."""

    active: bool
    reason: str
    path: Path | None = None
    is_fault: bool = False
    """Whether there is a build that cannot be used."""
    is_to_build: bool = False
    """Whether no build matches, and no attempt to build has failed."""


def load() -> tuple[ModuleType | None, Status]:
    """Call `find`, and log one line if the result is not what the user expects."""
    part, status = find()
    if status.is_fault or (not status.active and _is_asked_for()):
        logger.warning(
            "Native part: %s. ampatch works without it, with the same results.", status.reason
        )
    return part, status


def find() -> tuple[ModuleType | None, Status]:
    """Return the loaded native part, or None, and its status."""
    try:
        if environment.native_setting() is False:
            return None, Status(False, "off (AMPATCH_NATIVE=0)")
    except ValueError as error:  # `initialize` raises the error to the user
        return None, Status(False, f"off ({error})")
    if is_free_threaded():
        return None, Status(False, "off (this Python has no GIL, on which it relies)")
    try:
        path = built_file()
    except OSError as error:  # a program's archive may contain only the Python files
        return None, Status(False, f"off (its source is not installed: {error})")
    if failure_file().is_file():
        reason = f"not built; it did not compile here ({failure_file()} says more)"
        return None, Status(False, f"{reason}: run 'ampatch build'")
    if not path.is_file():
        return None, Status(False, "not built: run 'ampatch build'", is_to_build=True)
    try:
        part = _import_file(str(path))
    except Exception as error:
        reason = f"{path} does not load ({error}): run 'ampatch build --force'"
        return None, Status(False, reason, path, is_fault=True)
    return part, Status(True, f"active ({path})", path)


def _is_asked_for() -> bool:
    try:
        return environment.native_setting() is True
    except ValueError:
        return False


def _import_file(path: str) -> ModuleType:
    """Import the module in the file `path`.  Adds it to `sys.modules` for pickle and Dynamo."""
    loader = importlib.machinery.ExtensionFileLoader(NAME, path)
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[NAME] = module
    return module


def is_free_threaded() -> bool:
    """Whether this is a build of Python without the GIL: its tag is `cp313t`, or `cpython-313t`."""
    return re.match(r"\.cp(ython-)?\d+d?t", importlib.machinery.EXTENSION_SUFFIXES[0]) is not None


def sources() -> dict[str, bytes]:
    """The C++ sources by their names."""
    return {name: Path(__file__).with_name(name).read_bytes() for name in SOURCES}


def cache() -> Path:
    """The folder of the builds."""
    return Path(environment.cache_folder(), "native")


def built_file() -> Path:
    """Where the build of these sources for this torch, Python and platform lies, or would lie."""
    version = torch.version
    # These attributes differ between two builds of one torch version.
    build = [getattr(version, name, None) for name in ("git_version", "debug", "cuda", "hip")]
    content = b"".join(sources().values()) + repr((build, torch.compiled_with_cxx11_abi())).encode()
    versions = f"{torch.__version__}-{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    key, suffix = (
        hashlib.sha256(content).hexdigest()[:16],
        importlib.machinery.EXTENSION_SUFFIXES[0],
    )
    return cache() / f"{NAME}-{versions}-{key}{suffix}"


def failure_file() -> Path:
    """The file in which `building` records that this build failed."""
    return built_file().with_name(f"{built_file().name}.failed")
