"""`ampatch run` and `ampatch sweep` build the native part before the first trial, in one line."""

import os
import sys
import time

import pytest
from run_command import write

import ampatch.sweep
from ampatch import native
from ampatch.cli import main, native_first
from ampatch.errors import AmpatchError
from ampatch.native import building

TO_BUILD = native.Status(False, "not built: run 'ampatch build'", is_to_build=True)
BEGUN = "ampatch: compiling the native part, about 30 s, for all runs from now on\n"


@pytest.fixture
def built(monkeypatch):
    """There is no build, and all that one needs; the calls that would make it."""
    calls = []
    monkeypatch.setattr(native, "status", lambda: TO_BUILD)
    monkeypatch.setattr(native, "missing", lambda: None)
    monkeypatch.setattr(building, "build", lambda **how: calls.append(how))
    return calls


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_line_says_that_it_begins_and_one_that_it_was_built(rank, built, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    assert native_first.build()
    ended = "ampatch: native part built in 0 s (AMPATCH_NATIVE=0 runs without it).\n"
    assert capsys.readouterr() == ("", BEGUN + ended if rank == "0" else "")
    assert built == [{"again": False}]  # what another has made meanwhile is taken


@pytest.mark.parametrize("command", ["run", "build"])
def test_a_long_compilation_gives_signs_of_life(command, built, monkeypatch, capsys, tmp_path):
    said = []

    def compile(**how):
        end = time.monotonic() + 10
        while "still compiling, 0 s so far" not in "".join(said):
            assert time.monotonic() < end
            said.append(capsys.readouterr().err)
        return tmp_path

    monkeypatch.setattr(native_first, "INTERVAL", 0.01)
    monkeypatch.setattr(building, "build", compile)
    if command == "run":
        assert native_first.build()
    else:
        main.main(["build", "--force"])


@pytest.mark.parametrize(
    "status, lacks",
    [
        (native.Status(True, "active"), None),
        (native.Status(False, "off (AMPATCH_NATIVE=0)"), None),
        (native.Status(False, "x does not load", is_fault=True), None),
        (TO_BUILD, "there is no C++ compiler 'c++'."),
    ],
)
def test_nothing_is_tried_or_said_where_a_build_is_not_what_lacks_or_cannot_be_made(
    status, lacks, built, monkeypatch, capsys
):
    monkeypatch.setattr(native, "status", lambda: status)
    monkeypatch.setattr(native, "missing", lambda: lacks)
    assert not native_first.build()
    assert capsys.readouterr().err == "" and built == []


def test_a_failure_is_one_line_and_noted(built, monkeypatch, capsys):
    def fail(**how):
        raise AmpatchError("ampatch build: it does not compile.\nThe last lines:\nmuch")

    noted = []
    monkeypatch.setattr(building, "build", fail)
    monkeypatch.setattr(native, "record_failure", noted.append)
    assert not native_first.build()
    assert capsys.readouterr().err == (
        f"{BEGUN}ampatch: no native part: it does not compile. The run goes on in Python, with the "
        "same results; AMPATCH_NATIVE=0 leaves the attempt out.\n"
    )
    assert noted == ["it does not compile."]


def test_only_the_command_itself_is_started_again(monkeypatch):
    command = ["-m", "ampatch", "run", "train.py"]
    monkeypatch.setattr(sys, "orig_argv", ["python", *command])
    assert native_first.may_restart(["run", "train.py"])
    assert not native_first.may_restart(["run", "other.py"])
    assert not native_first.may_restart([])
    monkeypatch.setattr(sys, "executable", "")
    assert not native_first.may_restart(["run", "train.py"])


def test_a_run_is_started_again_with_its_build(built, tmp_path, monkeypatch, here):
    """Where a program has called the command it cannot be: nothing is built for it."""
    write(tmp_path / "script.py", "print('ran')")
    done = here("run", "script.py")
    assert (done.returncode, done.stdout, built) == (0, "ran\n", [])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "ampatch", "run", "script.py"])

    def replace(*call):
        built.append(call)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", replace)
    assert here("run", "script.py").stdout == ""
    assert built == [{"again": False}, (sys.executable, [sys.executable, *sys.orig_argv[1:]])]


@pytest.mark.parametrize("earlier", [0, 1])
def test_a_sweep_builds_before_its_first_trial(tmp_path, monkeypatch, earlier):
    """And not when it goes on: all of its trials have the same."""
    events = []

    class Sweep:
        def __init__(self, *script, **settings):
            self.runs = [None] * earlier

        def run(self, progress):
            events.append("trials")

    monkeypatch.setattr(ampatch.sweep, "Sweep", Sweep)
    monkeypatch.setattr(native_first, "build", lambda: events.append("build"))
    monkeypatch.setattr("ampatch.cli.sweep.report", lambda *args: 0)
    assert main.main(["sweep", str(write(tmp_path / "script.py", ""))]) == 0
    assert events == ["trials"] if earlier else ["build", "trials"]
