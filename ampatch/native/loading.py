"""Finds the build of the native part that matches this ampatch, torch and Python, and loads it.

A build is one file whose name says what it fits (`toolchain.file_name`).  It lies in
`CACHE/ampatch/native/`, where `ampatch build` puts it, or beside this file, where pip does.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

from ..config import environment
from ..log import logger
from . import toolchain

INSTALLED = Path(__file__).parent
_BUILD = "run 'ampatch build'"


@dataclasses.dataclass(frozen=True)
class Status:
    """Whether the native part is in force, why in one phrase, and the file that was found."""

    in_force: bool
    reason: str
    path: Path | None = None
    is_fault: bool = False
    """There is a build, and it cannot be used."""
    is_to_build: bool = False
    """There is no build that matches, and none was tried in vain."""


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
    if toolchain.is_free_threaded():
        return None, Status(False, "off (this Python has no GIL, on which it relies)")
    try:
        path = matching()
    except OSError as error:  # an archive of a program may hold its Python files alone
        return None, Status(False, f"off (its source is not installed: {error})")
    if path is None:
        return None, _without_build()
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


def _without_build() -> Status:
    stale = _other_builds()
    reason = stale or "not built"
    if failure() is not None:
        reason += f"; it did not compile here ({failure_file()} says more)"
        return Status(False, f"{reason}: {_BUILD}", is_fault=bool(stale))
    return Status(False, f"{reason}: {_BUILD}", is_fault=bool(stale), is_to_build=True)


def _other_builds() -> str:
    """What to say of builds that do not match, or `""` where there is none."""
    names = [path.name for folder in (cache(), INSTALLED) for path in folder.glob("*")]
    found = sorted(filter(None, map(toolchain.versions_of, names)))
    if not found:
        return ""
    ours = toolchain.versions()
    if ours in found:
        return "stale: built from other source or for another build of torch"
    return f"stale: built for {found[-1]}, this is {ours}"


def sources() -> dict[str, bytes]:
    """The C++ sources by their names."""
    found = {name: pkgutil.get_data(__package__, name) for name in toolchain.SOURCES}
    return {name: text for name, text in found.items() if text is not None}


def cache() -> Path:
    """The folder of the builds of `ampatch build`."""
    return Path(environment.cache_folder(), "native")


def built_file() -> Path:
    """Where in the cache the build that matches lies, or would lie."""
    return cache() / toolchain.file_name(b"".join(sources().values()))


def matching() -> Path | None:
    """The build that matches, from the cache or from pip."""
    built = built_file()
    return next((path for path in (built, INSTALLED / built.name) if path.is_file()), None)


def failure_file() -> Path:
    """Where `building` notes that this build failed: the compiler, and what it said."""
    return built_file().with_name(f"{built_file().name}.failed")


def failure() -> str | None:
    """What a build with the compiler of today said when it failed; None if there was none."""
    try:
        compiler, _, said = failure_file().read_text(encoding="utf-8").partition("\n")
    except OSError:
        return None
    return said if compiler == toolchain.compiler() else None


def import_file(path: str) -> ModuleType:
    """The module in the file `path`, in `sys.modules` too, where pickle and Dynamo look."""
    name = toolchain.NAME
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[name] = module
    return module
