"""What is installed is the whole package, and type checkers may read it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ampatch

ROOT = Path(ampatch.__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The package as `pip install` would lay it down."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder / "ampatch"


def test_type_checkers_are_told_that_the_package_has_types(built):
    assert (built / "py.typed").read_bytes() == b""


def test_the_native_part_is_installed_as_source(built):
    source = Path("native", "native.cpp")
    assert (built / source).read_bytes() == (ROOT / "ampatch" / source).read_bytes()


def test_the_source_archive_has_the_native_part(tmp_path):
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    listed = (tmp_path / "ampatch.egg-info" / "SOURCES.txt").read_text().splitlines()
    assert {"ampatch/native/native.cpp", "ampatch/native/in_child.py"} <= set(listed)


def test_every_module_is_installed(built):
    package = ROOT / "ampatch"
    assert {path.relative_to(built) for path in built.rglob("*.py")} == {
        path.relative_to(package) for path in package.rglob("*.py")
    }
