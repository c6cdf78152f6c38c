"""`ampatch build`, and what `ampatch doctor` and `ampatch.report` say of the native part."""

import json

import pytest
import torch
from native_runs import run_native
from quick_speed import measure_quickly

import ampatch
from ampatch import native
from ampatch.cli import doctor, main
from ampatch.errors import AmpatchError
from ampatch.native import building, loading

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


STATES = [
    native.Status(True, "active (/cache/file.so)"),
    native.Status(False, "off (AMPATCH_NATIVE=0)"),
]


def test_doctor_says_what_keeps_it_from_being_built(monkeypatch):
    status = native.Status(False, "not built: run 'ampatch build'", is_to_build=True)
    monkeypatch.setattr(native, "_status", status)
    for lacking, said in (("there is no compiler.", "; there is no compiler."), (None, "")):
        monkeypatch.setattr(building, "missing", lambda lacking=lacking: lacking)
        assert doctor.native_part() == status.reason + said


@pytest.mark.parametrize("status", STATES, ids=lambda status: status.reason.split()[0])
def test_doctor_and_report_say_which_is_in_force(status, monkeypatch, capsys):
    monkeypatch.setattr(native, "_status", status)
    monkeypatch.setattr(building, "missing", lambda: "there is no C++ compiler 'c++'.")
    measure_quickly(monkeypatch)
    assert doctor.facts()["native_part"] == status.reason
    assert main.main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["native_part"] == status.reason
    assert {"AMPATCH_NATIVE", "AMPATCH_CACHE"} <= set(facts["environment"])
    with ampatch.report() as casts:
        torch.nn.Linear(1, 1)(torch.ones(1, 1))
    assert f"Native part: {status.reason}" in str(casts).splitlines()
    assert casts.as_dict()["native_part"] == status.reason
