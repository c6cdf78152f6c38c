"""`ampatch run` and `ampatch sweep` build the native part before the first trial, in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_compiler import FakeCompiler
from native_runs import needs_compiler
from warm_python import environment

import ampatch.sweep
from ampatch import native
from ampatch.cli import main, native_first
from ampatch.errors import AmpatchError
from ampatch.native import building, loading

TO_BUILD = native.Status(False, "not built: run 'ampatch build'", is_to_build=True)
BEFORE = "The run goes on in Python, with the same results; AMPATCH_NATIVE=0 does not try.\n"


@pytest.fixture
def state(tmp_path, monkeypatch):
    """No build, an empty cache and all that a build needs."""
    monkeypatch.setenv("AMPATCH_CACHE", str(tmp_path))
    monkeypatch.delenv("AMPATCH_NATIVE", raising=False)
    monkeypatch.setattr(native, "_status", TO_BUILD)
    monkeypatch.setattr(building, "missing", lambda: None)


@pytest.fixture
def made(monkeypatch):
    """`made` tells what was built."""
    calls = []

    def make(target, verbose):
        calls.append(target)
        target.write_text("a library")

    monkeypatch.setattr(building, "_make", make)
    return calls


BEGUN = "ampatch: compiling the native part, about 30 s, for all runs from now on\n"


def test_a_line_says_that_it_begins_and_one_that_it_was_built(state, made, capsys):
    assert native_first.build()
    out, said = capsys.readouterr()
    assert said == (
        BEGUN + "ampatch: native part built in 0 s (AMPATCH_NATIVE=0 runs without it).\n"
    )
    assert out == "" and made == [loading.built_file()]


def test_a_build_that_another_has_made_meanwhile_is_taken(state, made):
    loading.cache().mkdir(parents=True)
    loading.built_file().write_text("a library")
    assert native_first.build() and made == []


@pytest.mark.parametrize(
    "status",
    [
        native.Status(True, "in force"),
        native.Status(False, "off (AMPATCH_NATIVE=0)"),
        native.Status(False, "x does not load", is_fault=True),
    ],
    ids=lambda status: status.reason,
)
def test_nothing_is_tried_where_a_build_is_not_what_lacks(state, made, monkeypatch, capsys, status):
    monkeypatch.setattr(native, "_status", status)
    assert not native_first.build()
    assert capsys.readouterr().err == "" and made == []


def test_nothing_is_said_where_there_is_no_compiler(state, made, monkeypatch, capsys):
    monkeypatch.setattr(building, "missing", lambda: "there is no C++ compiler 'c++'.")
    assert not native_first.build()
    assert capsys.readouterr().err == "" and made == []


def test_a_failure_is_one_line_and_no_advice_follows(state, monkeypatch, capsys, caplog):
    def make(target, verbose):
        raise AmpatchError("ampatch build: it does not compile.\nThe last lines:\nmuch")

    monkeypatch.setattr(building, "_make", make)
    assert not native_first.build()
    said = f"ampatch: no native part: it does not compile. {BEFORE}"
    assert capsys.readouterr().err == BEGUN + said
    assert native.status() == native.Status(False, "not built: it does not compile.")
    with caplog.at_level("INFO", logger="ampatch"):
        native.say_what_a_build_gives()
    assert caplog.messages == []


def test_a_cache_that_cannot_be_written_is_one_line(state, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AMPATCH_CACHE", str(tmp_path / "file"))
    assert not native_first.build()
    [_, line] = capsys.readouterr().err.splitlines()
    assert " cannot be written: " in line and "Set AMPATCH_CACHE to a folder that can." in line


def test_rank_0_speaks_for_all(state, made, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert native_first.build()
    assert capsys.readouterr().err == ""


def test_only_the_command_itself_is_started_again(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "ampatch", "run", "train.py"])
    assert native_first.may_restart(["run", "train.py"])
    assert not native_first.may_restart(["run", "other.py"])
    assert not native_first.may_restart([])
    monkeypatch.setattr(sys, "executable", "")
    assert not native_first.may_restart(["run", "train.py"])


def test_a_program_that_calls_the_command_goes_on(state, made, tmp_path, capsys):
    """It could not be started again: nothing is built for it."""
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    assert main.main(["run", str(script)]) == 0
    assert capsys.readouterr().out == "ran\n" and made == []


@pytest.mark.parametrize("earlier", [0, 1])
def test_a_sweep_builds_before_its_first_trial(state, tmp_path, monkeypatch, earlier):
    """And not when it goes on: all of its trials have the same."""
    events = []

    class Sweep:
        def __init__(self, *script, **settings):
            self.runs = [None] * earlier

        def run(self, progress):
            events.append("trials")

    monkeypatch.setattr(ampatch.sweep, "Sweep", Sweep)
    monkeypatch.setattr(native_first, "build", lambda: events.append("build"))
    monkeypatch.setattr("ampatch.cli.sweep._report", lambda *given: 0)
    script = tmp_path / "script.py"
    script.write_text("")
    assert main.main(["sweep", str(script)]) == 0
    assert events == ["trials"] if earlier else ["build", "trials"]


SCRIPT = """
import sys
import ampatch
import torch
from ampatch import native
ampatch.initialize(torch.nn.Linear(1, 1), opt_level="O0")
print(native.status().in_force, sys.argv[1:])
"""


def test_the_command_itself_is_what_starts_again(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda *call: started.append(call))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "ampatch", "run", "train.py"])
    native_first.restart()
    command = [sys.executable, "-m", "ampatch", "run", "train.py"]
    assert started == [(sys.executable, command)]


@needs_compiler
@pytest.mark.slow
def test_two_ranks_that_start_at_once_build_once_and_both_have_it(native_cache, tmp_path):
    """The fake compiler gives the build of the tests: what is real is all around it."""
    library = Path(native_cache, "ampatch", "native", loading.built_file().name)
    compiler = FakeCompiler(tmp_path, library)
    Path(tmp_path, "train.py").write_text(SCRIPT)
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
