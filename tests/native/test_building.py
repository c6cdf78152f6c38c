"""The native part is compiled whole or not at all, and errors say what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from native_runs import needs_compiler
from warm_python import environment

from ampatch.errors import AmpatchError
from ampatch.native import building, loading

TINY = b"""
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_ampatch_native", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit__ampatch_native() { return PyModule_Create(&definition); }
"""
BUILD_TINY = f"""
from ampatch.native import building, loading
loading.source = lambda: {TINY!r}
print(building.build())
assert loading.find()[1].in_force
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("AMPATCH_CACHE", str(tmp_path))
    return tmp_path


def files(folder: Path) -> list[Path]:
    """All files under a folder."""
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_missing_compiler_is_named(cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O0")
    with pytest.raises(AmpatchError, match=r"no C\+\+ compiler 'no-such-compiler'.*set CXX"):
        building.build()
    assert files(cache) == []


def test_missing_setuptools_are_named(cache, monkeypatch):
    find = building.importlib.util.find_spec
    monkeypatch.setattr(
        building.importlib.util, "find_spec", lambda name: None if "setup" in name else find(name)
    )
    with pytest.raises(AmpatchError, match="pip install setuptools"):
        building.build()


@needs_compiler
def test_missing_headers_are_named(cache, monkeypatch):
    monkeypatch.setattr(building.sysconfig, "get_path", lambda name: str(cache))
    with pytest.raises(AmpatchError, match=r"Python\.h is not in .*python3-dev"):
        building.build()


@needs_compiler
def test_a_cache_that_cannot_be_written_is_named(cache, monkeypatch):
    (cache / "file").write_text("")
    monkeypatch.setenv("AMPATCH_CACHE", str(cache / "file"))
    with pytest.raises(AmpatchError, match="cannot be written.*Set AMPATCH_CACHE"):
        building.build()


def test_a_python_without_the_gil_is_refused(monkeypatch):
    monkeypatch.setattr(loading, "is_free_threaded", lambda: True)
    with pytest.raises(AmpatchError, match="needs a Python with the GIL"):
        building.build()


@needs_compiler
@pytest.mark.parametrize(
    "source, said",
    [
        (b"\n".join([b"#error one"] * 30 + [b"#error the last"]), "the last"),
        (b"", "PyInit__ampatch"),
    ],
    ids=["does not compile", "does not load"],
)
def test_a_failure_shows_the_last_lines_and_leaves_no_file(cache, monkeypatch, source, said):
    monkeypatch.setattr(loading, "source", lambda: source)
    with pytest.raises(AmpatchError, match="does not compile or load here") as caught:
        building.build()
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 21
    assert files(cache) == []


@needs_compiler
def test_two_processes_may_build_at_once(cache):
    command = [sys.executable, "-c", BUILD_TINY]
    variables = environment(AMPATCH_CACHE=str(cache), AMPATCH_NATIVE="")
    running = [
        subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = {process.communicate()[0] for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert [f"{path}\n" for path in files(cache)] == list(said)


def test_the_build_of_the_session_is_one_file(native_cache, monkeypatch):
    monkeypatch.setenv("AMPATCH_CACHE", native_cache)
    assert loading.built_file() in files(loading.cache())
    assert [path for path in loading.cache().iterdir() if path.name.startswith(".")] == []


def test_clean_counts_builds_and_removes_what_was_left(cache):
    assert building.clean() == 0
    for name in ("a", "b", ".building-1"):
        (loading.cache() / name).mkdir(parents=True)
        (loading.cache() / name / loading.FILE).write_text("")
    assert building.clean() == 2
    assert files(cache) == []
