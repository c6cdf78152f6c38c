"""Compiles the native part into the cache.  Never called at training time."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from ..errors import AmpatchError
from . import loading

_LINES = 20  # of the compiler's output in an error


def build(verbose: bool = False) -> Path:
    """Compile the native part for this torch and Python; about half a minute.

    Returns the file in the cache, which appears there whole or not at all; several processes may
    build at once.  `verbose`: show what the compiler says.

    Raises `AmpatchError` if something that it needs is missing, or if it does not compile.
    """
    _check_needs()
    target = loading.built_file()
    try:
        loading.cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=loading.cache()) as folder:
            made = _compile(Path(folder), verbose)
            target.parent.mkdir(exist_ok=True)
            os.replace(made, target)
    except OSError as error:
        raise AmpatchError(
            f"ampatch build: the cache {loading.cache()} cannot be written: {error}. Set "
            "AMPATCH_CACHE to a folder that can."
        ) from error
    return target


def clean() -> int:
    """Remove every build from the cache; returns how many there were."""
    folders = [path for path in loading.cache().glob("*") if path.is_dir()]
    for folder in folders:
        shutil.rmtree(folder)
    return sum(not folder.name.startswith(".") for folder in folders)


def _compile(folder: Path, verbose: bool) -> Path:
    """The library, made in `folder` and imported once."""
    source = folder / loading.SOURCE
    source.write_bytes(loading.source())
    script = Path(__file__).with_name("in_child.py")
    command = [sys.executable, str(script), loading.NAME, str(source), str(folder)]
    done = subprocess.run(
        command,
        cwd=folder,
        env=_environment(),
        stdout=None if verbose else subprocess.PIPE,
        stderr=None if verbose else subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode != 0:
        last = [] if verbose else done.stdout.splitlines()[-_LINES:]
        said = "\n".join(["The last lines of its output:", *last] if last else ["It is above."])
        raise AmpatchError(
            "ampatch build: the native part does not compile or load here (exit status "
            f"{done.returncode}). ampatch works without it. Expected a C++ compiler that this "
            f"torch supports; CXX names another one. {said}"
        )
    [made] = folder.glob(f"{loading.NAME}.*")
    return made


def _environment() -> dict[str, str]:
    """Modules are found as in this process; C++ goes to the C++ compiler."""
    places = os.pathsep.join(os.path.abspath(place) for place in sys.path if place)
    found = {**os.environ, "PYTHONPATH": places}
    if os.name == "posix":
        found["CXX"] = found["CC"] = _compiler()
    return found


def _compiler() -> str:
    return os.environ.get("CXX", "") or "c++"


def _check_needs() -> None:
    """Say what is missing before anything runs."""
    if loading.is_free_threaded():
        raise AmpatchError(
            "ampatch build: the native part needs a Python with the GIL, and this one has none. "
            "ampatch works without it."
        )
    if importlib.util.find_spec("setuptools") is None:
        raise AmpatchError(
            "ampatch build: torch builds extensions with setuptools, which is missing. "
            "Run: pip install setuptools"
        )
    if os.name != "posix":
        return
    compiler = shlex.split(_compiler())[0]
    if shutil.which(compiler) is None:
        raise AmpatchError(
            f"ampatch build: there is no C++ compiler {compiler!r}. Install one (Debian and "
            "Ubuntu: apt-get install g++), or set CXX to the one to use."
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise AmpatchError(
            f"ampatch build: Python's header Python.h is not in {headers}. Install it (Debian "
            "and Ubuntu: apt-get install python3-dev)."
        )
