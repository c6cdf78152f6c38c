"""The native part is compiled whole or not at all, and errors say what to do."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from native_runs import needs_compiler

from ampatch.errors import AmpatchError
from ampatch.native import building, loading, toolchain


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("AMPATCH_CACHE", str(tmp_path))
    return tmp_path


def files(folder: Path) -> list[Path]:
    """All files under a folder, but for the lock."""
    return [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]


def test_a_missing_compiler_is_named(cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O0")
    with pytest.raises(AmpatchError, match=r"no C\+\+ compiler 'no-such-compiler'.*set CXX"):
        building.build()
    assert files(cache) == []


def test_missing_setuptools_are_named(cache, monkeypatch):
    find = toolchain.importlib.util.find_spec
    monkeypatch.setattr(
        toolchain.importlib.util, "find_spec", lambda name: None if "setup" in name else find(name)
    )
    with pytest.raises(AmpatchError, match="pip install setuptools"):
        building.build()


@needs_compiler
def test_missing_headers_are_named(cache, monkeypatch):
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(cache))
    with pytest.raises(AmpatchError, match=r"Python\.h is not in .*python3-dev"):
        building.build()


@needs_compiler
def test_a_cache_that_cannot_be_written_is_named(cache, monkeypatch):
    (cache / "file").write_text("")
    monkeypatch.setenv("AMPATCH_CACHE", str(cache / "file"))
    with pytest.raises(AmpatchError, match="cannot be written.*Set AMPATCH_CACHE"):
        building.build()


def test_a_python_without_the_gil_is_refused(monkeypatch):
    monkeypatch.setattr(toolchain, "is_free_threaded", lambda: True)
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
def test_a_failure_shows_the_last_lines_and_leaves_a_note(cache, monkeypatch, source, said):
    monkeypatch.setattr(loading, "sources", lambda: {"native.cpp": source})
    with pytest.raises(AmpatchError, match="does not compile or load here") as caught:
        building.build()
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 22
    assert files(cache) == [loading.failure_file()] and loading.failure() == str(caught.value)


def test_the_build_of_the_session_is_one_file(native_cache, monkeypatch):
    monkeypatch.setenv("AMPATCH_CACHE", native_cache)
    assert loading.built_file() in files(loading.cache())
    assert [path.name for path in loading.cache().glob(".*")] == [".lock"]


def test_clean_counts_builds_and_removes_what_was_left(cache):
    assert building.clean() == 0
    (loading.cache() / ".building-1").mkdir(parents=True)
    for path in (loading.built_file(), loading.failure_file()):
        path.write_text("")
    assert building.clean() == 1
    assert list(loading.cache().iterdir()) == []


# Several at once.  What the compiler does is done by this program, so nothing is compiled.


COMPILER = """
import os, sys, time
from pathlib import Path
with open({log!r}, "a") as log:
    print(os.getpid(), file=log)
{does}
Path(sys.argv[1], "_ampatch_native.so").write_text("a library")
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """`compiler(does)` stands for a compiler; it returns a list of the processes it ran in."""

    def make(does: str) -> Callable[[], list[int]]:
        log = tmp_path / "calls"
        log.write_text("")
        program = COMPILER.format(log=str(log), does=does)
        monkeypatch.setattr(toolchain, "missing", lambda: None)
        monkeypatch.setattr(
            toolchain, "command", lambda *given: [sys.executable, "-c", program, str(given[1])]
        )
        return lambda: list(map(int, log.read_text().split()))

    return make


def at_once(*calls: Callable[[], object]) -> list[object]:
    """What the calls return, or the errors that they raise, in threads of their own."""

    def result(call: Callable[[], object]) -> object:
        try:
            return call()
        except AmpatchError as error:
            return str(error)

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(result, calls))


def test_those_who_begin_at_once_build_once(compiler):
    calls = compiler("time.sleep(0.5)")
    one = functools.partial(building.build, again=False)
    assert at_once(one, one, one) == [loading.built_file()] * 3
    assert len(calls()) == 1
    building.build()
    assert len(calls()) == 2, "who asks for another gets another"


def test_a_failure_is_that_of_those_who_wait_too(compiler):
    calls = compiler("time.sleep(0.5); sys.exit('no such header')")
    one = functools.partial(building.build, again=False)
    [said] = set(at_once(one, one))
    assert said.endswith("no such header") and len(calls()) == 1
    calls = compiler("")
    assert building.build() == loading.built_file()
    assert loading.failure() is None and not loading.failure_file().exists()


def test_who_waits_is_asked_and_may_give_up(compiler):
    """And with the one that compiles ends what it has started."""
    calls = compiler("time.sleep(100)")
    seen = []

    def watch() -> None:
        seen.append(1)
        if len(seen) > 5 and calls():
            raise AmpatchError("given up")

    one = functools.partial(building.build, again=False, watch=watch)
    assert at_once(one, one) == ["given up"] * 2
    assert [is_running(process) for process in calls()] == [False] * len(calls())
    assert loading.failure() == "given up", "it is not tried again and again"


def is_running(process: int) -> bool:
    """Whether there is a process of this number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_file_system_without_locks_builds_all_the_same(compiler, monkeypatch):
    calls = compiler("")

    def flock(file, how):
        raise OSError("no locks available")

    monkeypatch.setattr(building.fcntl, "flock", flock)
    assert building.build(again=False) == loading.built_file() and len(calls()) == 1
