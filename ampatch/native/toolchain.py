"""What a build is called, what it needs, and the command that makes it.

It imports nothing of ours: `setup.py` runs this file by its path, where wrapt may be missing.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

NAME = "_ampatch_native"
SOURCES = ("native.cpp", "call.h", "copies.h", "entries.h", "gradients.h", "weights.h")
"""The first one is compiled, and includes the others."""

SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
_FILE = re.compile(rf"{NAME}-(?P<versions>.+)-[0-9a-f]{{16}}\.[^/]*(so|pyd)")


def file_name(source: bytes) -> str:
    """The name of the build of these sources for this torch, Python and platform, and of no other.

    `source`: all of them, one after the other.
    """
    return f"{NAME}-{versions()}-{_hash(source)}{SUFFIX}"


def versions() -> str:
    """The versions that a build has to have."""
    python = sys.implementation.cache_tag
    return f"{torch.__version__}-{python}-{sysconfig.get_platform()}"


def versions_of(file: str) -> str | None:
    """The versions in the name of a build; None for other files."""
    found = _FILE.fullmatch(file)
    return found and found["versions"]


def _hash(source: bytes) -> str:
    """Of the source, and of what tells two builds of one torch version apart."""
    version = torch.version
    build = [getattr(version, name, None) for name in ("git_version", "debug", "cuda", "hip")]
    abi = torch.compiled_with_cxx11_abi()
    return hashlib.sha256(source + repr((build, abi)).encode()).hexdigest()[:16]


def is_free_threaded() -> bool:
    """Whether this is a build of Python without the GIL: its tag is `cp313t`, or `cpython-313t`."""
    return re.match(r"\.cp(ython-)?\d+d?t", importlib.machinery.EXTENSION_SUFFIXES[0]) is not None


def missing() -> str | None:
    """What a build lacks here and how to get it, or None.  Starts no process."""
    if is_free_threaded():
        return (
            "the native part needs a Python with the GIL, and this one has none. "
            "ampatch works without it."
        )
    if importlib.util.find_spec("setuptools") is None:
        return (
            "torch builds extensions with setuptools, which is missing. Run: pip install setuptools"
        )
    if os.name != "posix":
        return None
    name = shlex.split(_compiler())[0]
    if shutil.which(name) is None:
        return (
            f"there is no C++ compiler {name!r}. Install one (Debian and Ubuntu: apt-get install "
            "g++), or set CXX to the one to use."
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return (
            f"Python's header Python.h is not in {headers}. Install it (Debian and Ubuntu: "
            "apt-get install python3-dev)."
        )
    return None


def compiler() -> str:
    """The compiler as it is called, and the program that this finds."""
    return f"{_compiler()} ({shutil.which(shlex.split(_compiler())[0])})"


def _compiler() -> str:
    return os.environ.get("CXX", "").strip() or "c++"


def command(source: Path, folder: Path) -> list[str]:
    """Compiles `source` into `folder` and imports the library once."""
    script = Path(__file__).resolve().with_name("in_child.py")
    return [sys.executable, str(script), NAME, str(source), str(folder)]


def environment() -> dict[str, str]:
    """For that command: modules are found as in this process; C++ goes to the C++ compiler."""
    places = os.pathsep.join(os.path.abspath(place) for place in sys.path if place)
    found = {**os.environ, "PYTHONPATH": places}
    if os.name == "posix":
        found["CXX"] = found["CC"] = _compiler()
    return found
