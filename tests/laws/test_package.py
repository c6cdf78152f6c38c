"""What is installed is the whole package, and type checkers may read it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from fake_compiler import FakeCompiler
from native_runs import needs_compiler
from warm_python import environment

import ampatch
from ampatch import types
from ampatch.compat.apex import amp
from ampatch.compat.apex.packages import VERSION
from ampatch.config.scale_settings import ScaleSettings
from ampatch.native import loading, toolchain

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
            {"models", "optimizers", "enabled", "opt_level", "num_losses", "dtype", "unknown"},
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
    for name in toolchain.SOURCES:
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
    assert {f"ampatch/native/{name}" for name in (*toolchain.SOURCES, "in_child.py")} <= set(listed)
    assert "ampatch/compat/apex_path/apex.dist-info/METADATA" in listed


def test_every_module_is_installed(built):
    package = ROOT / "ampatch"
    assert {path.relative_to(built) for path in built.rglob("*.py")} == {
        path.relative_to(package) for path in package.rglob("*.py")
    }


# `pip install --no-build-isolation .`


def build_ext(folder: Path, *python: str, **variables: str) -> tuple[list[Path], str]:
    """The libraries that pip would find built, and what was said."""
    pytest.importorskip("setuptools")
    options = [
        "build_ext",
        "--build-lib",
        str(folder / "lib"),
        "--build-temp",
        str(folder / "temp"),
    ]
    done = subprocess.run(
        [sys.executable, *(python or ["setup.py"]), *options],
        cwd=ROOT, env=environment(**variables), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = folder.joinpath("lib").rglob("*")
    return [path.relative_to(folder / "lib") for path in found if path.is_file()], done.stderr


@needs_compiler
def test_pip_builds_the_native_part_where_torch_is(native_cache, tmp_path):
    """Under the name by which this torch finds it, and with the one command of `ampatch build`."""
    name = loading.built_file().name
    compiler = FakeCompiler(tmp_path, Path(native_cache, "ampatch", "native", name))
    found, _ = build_ext(tmp_path, AMPATCH_NATIVE="", CXX=str(compiler.path))
    assert found == [Path("ampatch", "native", name)] and compiler.calls == 1


def test_an_install_goes_on_where_it_does_not_compile(tmp_path):
    found, said = build_ext(tmp_path, AMPATCH_NATIVE="", CXX="/bin/false")
    assert found == [] and f'extension "ampatch.native.{toolchain.NAME}" failed' in said


WITHOUT_TORCH = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path('setup.py')"


@pytest.mark.parametrize(
    "native, python", [("0", []), ("", ["-c", WITHOUT_TORCH])], ids=["off", "without torch"]
)
def test_nothing_is_compiled_where_it_is_off_or_torch_is_not(tmp_path, native, python):
    found, said = build_ext(tmp_path, *python, AMPATCH_NATIVE=native, CXX="no-such-compiler")
    assert found == [] and "no-such-compiler" not in said
