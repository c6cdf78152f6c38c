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
from ampatch.native import loading

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


def test_the_native_part_is_installed_as_source(built):
    for name in loading.SOURCES:
        source = Path("native", name)
        assert (built / source).read_bytes() == (ROOT / "ampatch" / source).read_bytes()


def test_the_templates_of_reports_are_installed(built):
    folder = Path("sweep", "report", "templates")
    sources = {path.name: path.read_bytes() for path in (ROOT / "ampatch" / folder).iterdir()}
    assert {path.name: path.read_bytes() for path in (built / folder).iterdir()} == sources


def test_the_folder_that_apex_path_prints_is_installed(built):
    folder = Path("compat", "apex_path")
    files = {path.relative_to(built / folder) for path in built.joinpath(folder).rglob("*.*")}
    metadata = Path("apex.dist-info", "METADATA")
    assert files == {
        *(Path("__init__.py"), Path("apex", "__init__.py"), metadata.parent),
    }
    assert f"\nVersion: {VERSION}\n" in (built / folder / metadata).read_text()


def test_the_source_archive_has_the_native_part(tmp_path):
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    listed = (tmp_path / "ampatch.egg-info" / "SOURCES.txt").read_text().splitlines()
    assert {f"ampatch/native/{name}" for name in (*loading.SOURCES, "in_child.py")} <= set(listed)
    assert "ampatch/compat/apex_path/apex.dist-info/METADATA" in listed


def test_every_module_is_installed(built):
    package = ROOT / "ampatch"
    assert {path.relative_to(built) for path in built.rglob("*.py")} == {
        path.relative_to(package) for path in package.rglob("*.py")
    }
