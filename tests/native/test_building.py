"""The native part is compiled whole or not at all, by `ampatch build`; errors say what to do."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from native_runs import needs_compiler, run_native
from quick_speed import measure_quickly

import ampatch
from ampatch import native
from ampatch.cli import doctor, main
from ampatch.errors import AmpatchError
from ampatch.native import building, loading

pytestmark = pytest.mark.usefixtures("cache")


def files(folder: Path) -> list[Path]:
    """All files under a folder, but for the lock."""
    return [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]


def test_a_missing_compiler_is_named(cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O0")
    with pytest.raises(AmpatchError, match=r"no C\+\+ compiler 'no-such-compiler'.*set CXX"):
        building.build()
    assert files(cache) == []


@needs_compiler
@pytest.mark.parametrize(
    "module, name, instead, said",
    [
        ("importlib.util", "find_spec", lambda name: None, "pip install setuptools"),
        ("sysconfig", "get_path", lambda name: "/nowhere", r"Python\.h is not in .*python3-dev"),
        ("loading", "is_free_threaded", lambda: True, "needs a Python with the GIL"),
    ],
)
def test_what_a_build_lacks_is_named(module, name, instead, said, monkeypatch):
    monkeypatch.setattr(f"ampatch.native.building.{module}.{name}", instead)
    with pytest.raises(AmpatchError, match=said):
        building.build()


@needs_compiler
def test_a_cache_that_cannot_be_written_is_named(cache, monkeypatch):
    (cache / "file").write_text("")
    monkeypatch.setenv("AMPATCH_CACHE", str(cache / "file"))
    with pytest.raises(AmpatchError, match="cannot be written.*Set AMPATCH_CACHE"):
        building.build()


@needs_compiler
def test_a_failure_shows_the_last_lines_and_leaves_a_note(cache, monkeypatch):
    """Of a source that compiles with many warnings, and does not load."""
    source = b"\n".join([b"#warning one"] * 30)
    monkeypatch.setattr(loading, "sources", lambda: {"native.cpp": source})
    with pytest.raises(AmpatchError, match="does not compile or load here") as caught:
        building.build()
    assert "PyInit__ampatch" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 22
    assert files(cache) == [loading.failure_file()]
    with pytest.raises(AmpatchError) as again:
        monkeypatch.setattr(building, "_make", None)
        building.build(again=False)
    assert str(again.value) == str(caught.value)


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="no process groups")
@needs_compiler
def test_a_build_that_takes_too_long_ends_with_the_compiler_that_it_started(cache, monkeypatch):
    compiler = "import time; open('begun', 'w').close(); time.sleep(1); open('ended', 'w').close()"
    started = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {compiler!r}])"
    monkeypatch.setattr(building, "command", lambda folder: [sys.executable, "-c", started])
    monkeypatch.setattr(building, "_environment", lambda: None)
    compile_in = building._compile
    monkeypatch.setattr(building, "_compile", lambda folder, verbose: compile_in(cache, verbose))

    def communicate(child, timeout):
        while not (cache / "begun").is_file():
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("", timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    with pytest.raises(AmpatchError, match=r"not compile within 300 s\. Run ampatch build again"):
        building.build()
    time.sleep(1.2)
    assert not (cache / "ended").is_file()


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
    assert not loading.cache().exists()


def test_those_who_begin_at_once_build_once(monkeypatch):
    """And who asks for another build gets another."""
    folders = []

    def compiled(folder: Path, verbose: bool) -> Path:
        folders.append(folder)
        time.sleep(0.3)
        (folder / "library").write_text("a library")
        return folder / "library"

    monkeypatch.setattr(building, "missing", lambda: None)
    monkeypatch.setattr(building, "_compile", compiled)
    with ThreadPoolExecutor(3) as pool:
        files_built = list(pool.map(lambda _: building.build(again=False), range(3)))
    assert files_built == [loading.built_file()] * 3 and len(folders) == 1
    building.build()
    assert len(folders) == 2


def test_a_file_system_without_locks_builds_all_the_same(monkeypatch):
    def flock(file, how):
        raise OSError("no locks available")

    monkeypatch.setattr(building, "missing", lambda: None)
    monkeypatch.setattr(building, "_make", lambda target, verbose: target.write_text(""))
    monkeypatch.setattr(building.fcntl, "flock", flock)
    assert building.build(again=False) == loading.built_file()


# `ampatch build`, and what `ampatch doctor` and `ampatch.report` say of the native part

MAIN = "import sys; from ampatch.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def built(cache):
    """A file in the place of the build, which is no library."""
    loading.built_file().parent.mkdir(parents=True)
    loading.built_file().write_text("")


def test_it_says_what_it_does_and_where_the_file_is(built, monkeypatch, capsys):
    monkeypatch.setenv("AMPATCH_NATIVE", "0")
    monkeypatch.setattr(building, "build", lambda verbose: loading.built_file())
    assert main.main(["build"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"There is a build already: {loading.built_file()} (--force builds again")

    assert main.main(["build", "--force"]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith(f"Compiling for torch {torch.__version__} and Python 3.")
    assert second.startswith("Built in ") and second.endswith(f" s: {loading.built_file()}")
    assert third == "Native part: off (AMPATCH_NATIVE=0)"


def test_what_cannot_be_used_is_exit_code_1(built, monkeypatch, capsys):
    assert main.main(["build"]) == 1
    assert " does not load " in capsys.readouterr().out

    def build(verbose):
        raise AmpatchError("ampatch build: there is no C++ compiler.")

    monkeypatch.setattr(building, "build", build)
    assert main.main(["build", "--force"]) == 1
    assert capsys.readouterr().err == "ampatch build: there is no C++ compiler.\n"


def test_a_wrong_command_line_is_exit_code_2():
    with pytest.raises(SystemExit) as end:
        main.main(["build", "--force", "--clean"])
    assert end.value.code == 2


def test_clean_removes_builds(built, capsys):
    assert main.main(["build", "--clean"]) == 0
    assert capsys.readouterr().out == f"Removed from {loading.cache()}: 1 builds.\n"
    assert not loading.cache().exists()


def test_a_build_that_matches_is_in_force(native_cache):
    done = run_native(MAIN, "build", native="", cache=native_cache)
    assert done.returncode == 0, done.stderr
    already, status = done.stdout.splitlines()
    assert already.startswith("There is a build already: ")
    assert status.startswith(f"Native part: active ({native_cache}")


def test_a_program_is_compared_to_the_bit(same_bits_with_native):
    program = """
        found = {"nan": torch.tensor([float("nan"), -0.0]), "list": [torch.ones(2, 2).mT, 1.5]}
        torch.save(found, sys.argv[1])
    """
    assert same_bits_with_native(program)["list"][1] == 1.5
    with pytest.raises(AssertionError, match="other bits"):
        same_bits_with_native("torch.save([0.0 if native.status().active else -0.0], sys.argv[1])")


def test_doctor_says_what_keeps_it_from_being_built(monkeypatch):
    status = native.Status(False, "not built: run 'ampatch build'", is_to_build=True)
    monkeypatch.setattr(native, "_status", status)
    for lacking, said in (("there is no compiler.", "; there is no compiler."), (None, "")):
        monkeypatch.setattr(building, "missing", lambda lacking=lacking: lacking)
        assert doctor.native_part() == status.reason + said


@pytest.mark.parametrize("reason", ["active (/cache/file.so)", "off (AMPATCH_NATIVE=0)"])
def test_doctor_and_report_say_which_is_in_force(reason, monkeypatch, capsys):
    status = native.Status(reason.startswith("active"), reason)
    monkeypatch.setattr(native, "_status", status)
    monkeypatch.setattr(building, "missing", lambda: "there is no C++ compiler 'c++'.")
    measure_quickly(monkeypatch)
    assert doctor.facts()["native_part"] == reason
    assert main.main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["native_part"] == reason
    assert {"AMPATCH_NATIVE", "AMPATCH_CACHE"} <= set(facts["environment"])
    with ampatch.report() as casts:
        torch.nn.Linear(1, 1)(torch.ones(1, 1))
    assert f"Native part: {reason}" in str(casts).splitlines()
    assert casts.as_dict()["native_part"] == reason
