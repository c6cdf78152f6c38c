"""Which build of the native part is loaded, and what is said when there is none that matches."""

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


def put(path: Path, content: bytes = b"not a library") -> Path:
    """A file with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def load(caplog) -> tuple[loading.Status, list[str]]:
    """The status, nothing being loaded, and the lines in the log."""
    with caplog.at_level(logging.INFO, logger="ampatch"):
        part, status = loading.load()
    assert part is None and not status.active
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    return status, caplog.messages


NOT_BUILT = "not built: run 'ampatch build'"
FAILED = "not built; it did not compile here ({failure} says more): run 'ampatch build'"
UNUSED = {  # AMPATCH_NATIVE, a file in the cache, the reason, and whether a line is said
    "nothing was built": ("", None, NOT_BUILT, False),
    "asked for": ("1", None, NOT_BUILT, True),
    "off": ("0", loading.built_file, "off (AMPATCH_NATIVE=0)", False),
    "wrong": ("maybe", None, "off (AMPATCH_NATIVE=maybe: expected 0 (off) or 1.)", False),
    "a build in progress": (
        "",
        lambda: loading.cache() / ".building-1" / loading.built_file().name,
        NOT_BUILT,
        False,
    ),
    "a build that failed": ("", loading.failure_file, FAILED, False),
}


@pytest.mark.parametrize("title", UNUSED)
def test_what_is_said_where_no_build_is_loaded(title, cache, caplog, monkeypatch):
    asked, file, reason, is_said = UNUSED[title]
    monkeypatch.setenv("AMPATCH_NATIVE", asked)
    if file is not None:
        put(file())
    status, said = load(caplog)
    assert status.reason == reason.format(failure=loading.failure_file())
    assert status.is_to_build is (reason == NOT_BUILT) and not status.is_fault
    end = "ampatch works without it, with the same results."
    assert said == ([f"Native part: {reason}. {end}"] if is_said else [])


def test_a_wrong_value_is_raised_by_initialize(monkeypatch):
    monkeypatch.setenv("AMPATCH_NATIVE", "maybe")
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


def test_no_source_no_native_part(cache, caplog, monkeypatch):
    """A program in an archive may carry the Python files alone."""
    monkeypatch.setattr(loading, "SOURCES", ("no_such.h",))
    status, said = load(caplog)
    assert status.reason.startswith("off (its source is not installed: ") and said == []


WITHOUT_GIL = (".cpython-313t-x86_64-linux-gnu.so", ".cpython-313td-darwin.so", ".cp314t.pyd")
WITH_GIL = (".cpython-313-darwin.so", ".cpython-313d-x86_64-linux-gnu.so", ".cp311.pyd", ".pyd")


@pytest.mark.parametrize("suffix", [*WITHOUT_GIL, *WITH_GIL])
def test_a_python_without_the_gil_is_left_alone(cache, caplog, monkeypatch, suffix):
    monkeypatch.setattr(importlib.machinery, "EXTENSION_SUFFIXES", [suffix])
    put(loading.built_file())
    status, said = load(caplog)
    assert status.reason.startswith("off (this Python has no GIL") is (suffix in WITHOUT_GIL)
    assert len(said) == (suffix in WITH_GIL)  # there the file is tried


@pytest.mark.parametrize(
    "own, xdg, expected",
    [
        ("/a", "/b", "/a/ampatch"),
        ("", "/b", "/b/ampatch"),
        ("", "", "/c/.cache/ampatch"),
        ("~/d", "/b", "/c/d/ampatch"),
    ],
)
def test_where_the_cache_is(monkeypatch, own, xdg, expected):
    for name, value in {"AMPATCH_CACHE": own, "XDG_CACHE_HOME": xdg, "HOME": "/c"}.items():
        monkeypatch.setenv(name, value)
    assert str(loading.cache()) == os.path.join(expected, "native")


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

    monkeypatch.setattr(log._repeat_filter, "_logged_once", set())
    return said


@needs_compiler
def test_initialize_says_once_what_a_build_would_give(advice):
    [line] = advice(native.Status(False, "not built", is_to_build=True))
    assert line == (
        "ampatch runs in Python. Its native part makes small steps at O1 about "
        f"{native.SPEEDUP} times as fast, with the same results: python -m ampatch build, once, "
        "takes half a minute."
    )


@pytest.mark.parametrize(
    "compiler, status",
    [
        ("no-such-compiler", native.Status(False, "not built", is_to_build=True)),
        ("c++", native.Status(True, "active")),
        ("c++", native.Status(False, "off (AMPATCH_NATIVE=0)")),
    ],
)
def test_it_does_not_where_none_could_be_or_is_wanted(advice, compiler, status, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    assert advice(status) == []


# In processes of their own: what `import ampatch` does.


def test_import_loads_a_build_that_matches_and_nothing_that_only_a_build_needs(native_cache):
    program = """
        import sys
        from ampatch import native
        builders = {"ampatch.native.building", "torch.utils.cpp_extension", "setuptools"}
        print(builders & set(sys.modules), native.part is not None, native.status().reason)
    """
    for asked in ("", "0"):
        done = run_native(program, native=asked, cache=native_cache)
        active = f"set() True active ({native_cache}{os.sep}ampatch{os.sep}native{os.sep}_amp"
        expected = "set() False off (AMPATCH_NATIVE=0)" if asked else active
        assert done.stdout.startswith(expected)
        assert done.stderr == "" and done.returncode == 0


def test_import_says_one_line_about_a_broken_build(cache):
    path = put(loading.built_file())
    program = "from ampatch import native; print(native.part, native.status().reason)"
    done = run_native(program, native="", cache=str(cache))
    assert done.stdout.startswith(f"None {path} does not load (") and done.returncode == 0
    assert done.stdout.endswith("run 'ampatch build --force'\n")
    [line] = done.stderr.splitlines()
    assert line.startswith("Native part: ") and " does not load " in line


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
        made = ampatch.native.part.cast_weights([nan], torch.bfloat16, False)[0].view(torch.int16)
        print(torch.equal(made, nan.bfloat16().view(torch.int16)))
    """
    done = run_native(program, native="1", cache=native_cache)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


@pytest.mark.skipif(os.environ.get("AMPATCH_NATIVE") != "1", reason="AMPATCH_NATIVE is not 1")
def test_a_run_of_the_tests_that_asks_for_it_has_it():
    assert native.status().active, native.status()
