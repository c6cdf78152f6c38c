"""What is installed is the whole package, and type checkers may read it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import ampatch
from ampatch import types
from ampatch.compat.apex import amp
from ampatch.compat.apex.packages import VERSION
from ampatch.config.scale_settings import ScaleSettings

ROOT = Path(ampatch.__file__).parents[1]


def files(folder: Path) -> dict[str, bytes]:
    """The files of a package, but for what Python and compilers leave there."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so")
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The package as `pip install` would lay it down."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder / "ampatch"


@pytest.mark.parametrize(
    "function, settings, spelled_out",
    [
        (
            ampatch.initialize,
            types.Settings,
            {"models", "optimizers", "enabled", "opt_level", "num_losses", "dtype"},
        ),
        (
            amp.initialize,
            types.ApexSettings,
            {"models", "optimizers", "enabled", "opt_level", "num_losses"},
        ),
        (ScaleSettings, types.ScaleSettings, set()),
    ],
    ids=["initialize", "apex", "loss scale"],
)
def test_type_checkers_know_each_setting(function, settings, spelled_out):
    """`tests/types/calls.py` tries the types."""
    names = set(inspect.signature(function).parameters)
    assert settings.__optional_keys__ == names - spelled_out


def test_all_files_are_installed_as_they_are(built):
    """Modules, `py.typed`, the sources of the native part, templates, and apex's stand-in."""
    found = files(built)
    assert found == files(ROOT / "ampatch")
    assert f"\nVersion: {VERSION}\n" in found["compat/apex_path/apex.dist-info/METADATA"].decode()


def test_the_source_archive_has_them(tmp_path):
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    listed = (tmp_path / "ampatch.egg-info" / "SOURCES.txt").read_text().splitlines()
    assert {f"ampatch/{name}" for name in files(ROOT / "ampatch")} <= set(listed)
