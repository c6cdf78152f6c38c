"""Which build of the native part is loaded, and what is said when there is none that matches."""

from __future__ import annotations

import importlib.machinery
import logging
import os
import subprocess
from pathlib import Path

import pytest
import torch
from native_runs import needs_compiler, run_native

import ampatch
from ampatch import log, native
from ampatch.native import loading

SHOW = """
    import ampatch
    from ampatch import native
    print(native.status().in_force, native.part is not None, native.status().reason)
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and no choice of the caller's."""
    monkeypatch.setenv("AMPATCH_CACHE", str(tmp_path))
    monkeypatch.delenv("AMPATCH_NATIVE", raising=False)
    return tmp_path


def put(path: Path, content: bytes = b"not a library") -> Path:
    """A file with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def load(caplog) -> tuple[loading.Status, list[str]]:
    """The status, nothing being loaded, and the lines in the log."""
    with caplog.at_level(logging.INFO, logger="ampatch"):
        part, status = loading.load()
    assert part is None and not status.in_force
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    return status, caplog.messages


def test_where_nothing_was_built_nothing_is_said(cache, caplog):
    status, said = load(caplog)
    assert status == native.Status(False, "not built: run 'ampatch build'", is_to_build=True)
    assert said == []


def test_one_line_where_it_was_asked_for(cache, caplog, monkeypatch):
    monkeypatch.setenv("AMPATCH_NATIVE", "1")
    _, said = load(caplog)
    assert said == [
        "Native part: not built: run 'ampatch build'. "
        "ampatch works without it, with the same results."
    ]


def test_switched_off_nothing_is_looked_at(cache, caplog, monkeypatch):
    put(loading.built_file())
    monkeypatch.setenv("AMPATCH_NATIVE", "0")
    status, said = load(caplog)
    assert status.reason == "off (AMPATCH_NATIVE=0)" and said == []


def test_a_wrong_value_is_named_and_initialize_raises_it(cache, caplog, monkeypatch):
    monkeypatch.setenv("AMPATCH_NATIVE", "maybe")
    status, said = load(caplog)
    assert status.reason == "off (AMPATCH_NATIVE=maybe: expected 0 (off) or 1.)" and said == []
    with pytest.raises(ValueError, match="AMPATCH_NATIVE=maybe: expected 0"):
        ampatch.initialize(torch.nn.Linear(1, 1), verbosity=0)


def test_a_build_of_other_source_or_for_another_torch_does_not_match(cache, caplog, monkeypatch):
    put(loading.built_file())
    assert load(caplog)[0].is_fault, "it is found, and is no library"
    with monkeypatch.context() as patch:
        sources = loading.sources()
        patch.setattr(loading, "sources", lambda: {**sources, "call.h": b"\n"})
        assert load(caplog)[0].is_to_build
    for where, name in ((torch, "__version__"), (torch.version, "git_version")):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, "9.9.9")
            assert load(caplog)[0].is_to_build


def test_a_build_that_failed_is_not_to_be_tried_again(cache, caplog):
    note = put(loading.failure_file(), b"no such header")
    status, said = load(caplog)
    assert status.reason == (
        f"not built; it did not compile here ({note} says more): run 'ampatch build'"
    )
    assert not status.is_to_build and said == []


def test_a_build_in_progress_is_not_stale(cache, caplog):
    put(loading.cache() / ".building-1234" / loading.built_file().name)
    status, said = load(caplog)
    assert status.reason == "not built: run 'ampatch build'" and said == []


def test_a_broken_file_gives_one_line(cache, caplog):
    path = put(loading.built_file())
    status, said = load(caplog)
    assert status.reason.startswith(f"{path} does not load (")
    assert status.reason.endswith("run 'ampatch build --force'")
    assert status.path == path and status.is_fault and len(said) == 1


def test_no_source_no_native_part(cache, caplog, monkeypatch):
    """A program in an archive may carry the Python files alone."""
    monkeypatch.setattr(loading, "SOURCES", ("no_such.h",))
    status, said = load(caplog)
    assert status.reason.startswith("off (its source is not installed: ") and said == []


@pytest.mark.parametrize(
    "suffix, free",
    [
        (".cpython-313t-x86_64-linux-gnu.so", True),
        (".cpython-313td-x86_64-linux-gnu.so", True),
        (".cp314t-win_amd64.pyd", True),
        (".cpython-313-darwin.so", False),
        (".cpython-313d-x86_64-linux-gnu.so", False),
        (".cp311-win_amd64.pyd", False),
        (".pyd", False),
    ],
)
def test_a_python_without_the_gil_is_left_alone(cache, caplog, monkeypatch, suffix, free):
    monkeypatch.setattr(importlib.machinery, "EXTENSION_SUFFIXES", [suffix])
    put(loading.built_file(), b"")
    status, said = load(caplog)
    assert status.reason.startswith("off (this Python has no GIL") is free
    assert len(said) == (0 if free else 1)  # with the GIL the empty file is tried


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"AMPATCH_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a/ampatch"),
        ({"AMPATCH_CACHE": "", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/ampatch"),
        ({"AMPATCH_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/ampatch"),
        ({"AMPATCH_CACHE": "~/d", "HOME": "/c"}, "/c/d/ampatch"),
    ],
)
def test_where_the_cache_is(monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(loading.cache()) == os.path.join(expected, "native")


# What `initialize` says


@pytest.fixture
def advice(monkeypatch, caplog):
    """What `initialize` says of a build in a process with this status, which starts no process."""

    def said(status: native.Status) -> list[str]:
        monkeypatch.setattr(native, "_status", status)
        monkeypatch.setattr(subprocess, "Popen", None)
        with caplog.at_level(logging.INFO, logger="ampatch"):
            for _ in range(2):
                ampatch.initialize(torch.nn.Linear(1, 1))
        return [line for line in caplog.messages if "native part" in line]

    monkeypatch.setattr(log._noise, "_said_for_good", set())
    return said


@needs_compiler
def test_initialize_says_once_what_a_build_would_give(advice):
    [line] = advice(native.Status(False, "not built", is_to_build=True))
    assert line == (
        "ampatch runs in Python. Its native part makes small steps at O1 about 1.22 times as fast, "
        "with the same results: python -m ampatch build, once, takes half a minute."
    )


def test_it_does_not_where_nothing_could_build(advice, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert advice(native.Status(False, "not built", is_to_build=True)) == []


@pytest.mark.parametrize(
    "status",
    [native.Status(True, "in force"), native.Status(False, "off (AMPATCH_NATIVE=0)")],
    ids=lambda status: status.reason,
)
def test_it_does_not_where_a_build_is_or_is_not_wanted(advice, status):
    assert advice(status) == []


# In processes of their own: what `import ampatch` does.


@pytest.mark.parametrize("asked", ["", "1", "0"])
def test_import_loads_a_build_that_matches(native_cache, asked):
    done = run_native(SHOW, native=asked, cache=native_cache)
    in_force, has_part, reason = done.stdout.rstrip().split(" ", 2)
    if asked == "0":
        assert (in_force, has_part, reason) == ("False", "False", "off (AMPATCH_NATIVE=0)")
    else:
        assert (in_force, has_part) == ("True", "True")
        assert reason.startswith(
            f"in force ({native_cache}{os.sep}ampatch{os.sep}native{os.sep}_amp"
        )
    assert done.stderr == "" and done.returncode == 0


def test_import_says_one_line_about_a_broken_build(cache):
    put(loading.built_file())
    done = run_native(SHOW, native="", cache=str(cache))
    assert done.stdout.startswith("False False ") and done.returncode == 0
    [line] = done.stderr.splitlines()
    assert line.startswith("Native part: ") and " does not load " in line


def test_import_loads_nothing_that_only_a_build_needs(native_cache):
    program = """
        import sys
        import ampatch
        builders = {"ampatch.native.building", "torch.utils.cpp_extension", "setuptools"}
        print(builders & set(sys.modules), ampatch.native.status().in_force)
    """
    done = run_native(program, native="1", cache=native_cache)
    assert done.stdout == "set() True\n"


@pytest.mark.parametrize(
    "imported_within",
    [
        "with FakeTensorMode(): import ampatch",
        "torch.func.functionalize(load)(torch.ones(2))",
        "torch.func.vmap(load)(torch.ones(2))",
    ],
)
def test_import_within_modes_and_transforms(native_cache, imported_within):
    """What the native part asks torch about NaN when it is loaded has numbers there too."""
    program = f"""
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode

        def load(x):
            import ampatch
            return x

        {imported_within}
        import ampatch
        nan = torch.full((5,), float("nan"))
        made = ampatch.native.part.copies([nan], torch.bfloat16)[0].view(torch.int16)
        print(torch.equal(made, nan.bfloat16().view(torch.int16)))
    """
    done = run_native(program, native="1", cache=native_cache)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


@pytest.mark.skipif(os.environ.get("AMPATCH_NATIVE") != "1", reason="AMPATCH_NATIVE is not 1")
def test_a_run_of_the_tests_that_asks_for_it_has_it():
    assert native.status().in_force, native.status()
