"""`ampatch run` and `ampatch sweep` build the native part before the first trial, in one line."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_compiler import FakeCompiler
from native_runs import needs_compiler
from run_command import write
from warm_python import environment

import ampatch.sweep
from ampatch import native
from ampatch.cli import main, native_first
from ampatch.errors import AmpatchError
from ampatch.native import building, loading

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
    started = []
    monkeypatch.setattr(os, "execv", lambda *call: started.append(call))
    native_first.restart()
    assert started == [(sys.executable, [sys.executable, *command])]
    monkeypatch.setattr(sys, "executable", "")
    assert not native_first.may_restart(["run", "train.py"])


def test_a_program_that_calls_the_command_goes_on(built, tmp_path, here):
    """It could not be started again: nothing is built for it."""
    write(tmp_path / "script.py", "print('ran')")
    done = here("run", "script.py")
    assert (done.returncode, done.stdout, built) == (0, "ran\n", [])


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


SCRIPT = """
import sys
import ampatch
import torch
from ampatch import native
ampatch.initialize(torch.nn.Linear(1, 1), opt_level="O0")
print(native.status().active, sys.argv[1:])
"""


@needs_compiler
@pytest.mark.slow
def test_two_ranks_that_start_at_once_build_once_and_both_have_it(native_cache, tmp_path):
    """The fake compiler gives the build of the tests: what is real is all around it."""
    library = Path(native_cache, "ampatch", "native", loading.built_file().name)
    compiler = FakeCompiler(tmp_path, library)
    write(tmp_path / "train.py", SCRIPT)
    command = [sys.executable, "-m", "ampatch", "run", "train.py", "--lr", "1"]
    own = {"AMPATCH_CACHE": str(tmp_path), "AMPATCH_NATIVE": "", "CXX": str(compiler.path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    ranks = [
        subprocess.Popen(command, env=environment(**own, RANK=str(rank)), **pipes)
        for rank in range(2)
    ]
    ended = [rank.communicate() for rank in ranks]
    assert [out for out, _ in ended] == ["True ['--lr', '1']\n"] * 2, ended
    assert ended[0][1].startswith(BEGUN + "ampatch: native part built in "), ended
    assert [err.count("\n") for _, err in ended] == [2, 0], ended
    assert compiler.calls == 1
