"""A sweep's directory: what is kept, gone on with, replaced and refused.  Runs are made by hand."""

import dataclasses
import errno
import gc
from pathlib import Path

import pytest
from run_command import write
from sweep_made import stand_in, trained

from ampatch.cli.main import main
from ampatch.diagnose.speed import HalfSpeeds
from ampatch.log import set_verbosity
from ampatch.sweep import Case, Sweep, read_results, read_runs, read_sweep
from ampatch.sweep.execution import collected_runs, half_dtypes
from ampatch.sweep.kinds import NO_AMP, Kind
from ampatch.tune import Tuning

SCRIPT = "print('never run here')\n"


class Machine:
    """Stands for the processes: notes what is run, and fails on demand."""

    def __init__(self):
        self.ran, self.steps = [], []
        self.fails = {}  # by number of the run

    def run(self, runner, trial, place):
        failure = self.fails.get(len(self.ran))
        self.ran.append(trial.label)
        self.steps.append((trial.label, runner.steps))
        if isinstance(failure, BaseException):
            raise failure
        run = trained(trial, [1.0 + trial.seed], ms=10.0)
        return dataclasses.replace(run, ended_by=failure or "", timeout=runner.timeout)


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    stand_in(monkeypatch, machine.run)
    return machine


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return "train.py"


def make(script, out="out", **options):
    settings = {"levels": ["O0", "O1"], "dtypes": ["float16"], "seeds": 2, "rounds": 1, **options}
    return Sweep(script, autocast=False, out=out, **settings)


ALL = ["O0 seed 0", "O0 seed 1", "O1-float16 seed 0", "O1-float16 seed 1"]


def test_an_interrupted_sweep_goes_on_where_it_was(script, machine):
    machine.fails[3] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        make(script).run()
    kept = read_results("out")
    assert (kept.done, kept.planned, kept.complete) == (3, 4, False)
    assert [row.label for row in kept.rows] == ["O0", "O1-float16"]

    machine.ran.clear()
    plan = make(script, resume=True).run()

    assert machine.ran == ALL[3:]
    results = read_results("out")
    assert results.complete and results == plan.results and results.started == kept.started
    assert [row.runs for row in results.rows] == [2, 2]
    machine.ran.clear()
    make(script, resume=True).run()
    assert machine.ran == []


CUT_OFF = [b"", b'{"format": 4, "planned": {"ca', b"\0" * 4096, b"\xff\xfe", b"12", b"{}"]


def test_a_run_whose_file_is_cut_off_counts_as_not_done(script, machine, caplog, capsys):
    """A full disk or a power cut leaves it: `report` names it, and `--resume` runs it again."""
    make(script).run()
    file = Path("out/runs/O1-float16.seed1.repeat0.json")
    whole, before = file.read_bytes(), read_results("out")
    for content in CUT_OFF:
        file.write_bytes(content)
        set_verbosity(1)  # what was said is said again
        caplog.clear(), machine.ran.clear()
        assert main(["report", "out"]) == 0
        named = {record.getMessage().partition(":")[0] for record in caplog.records}
        assert named == {str(file)}, content
        assert "counts as not done" in caplog.text and "Traceback" not in capsys.readouterr().err
        stored = read_sweep("out")
        assert (stored.results.done, len(stored.runs)) == (3, 3) and before.done == 4
        make(script, resume=True).run()
        assert machine.ran == ALL[3:] and file.read_bytes() == whole, content
        assert read_results("out").rows == before.rows


def test_a_run_in_another_format_is_refused(script, machine):
    make(script).run()
    file = Path("out/runs/O1-float16.seed1.repeat0.json")
    file.write_text('{"format": 1}')
    with pytest.raises(ValueError, match="a run in format 1"):
        read_sweep("out")


def test_a_longer_timeout_gives_another_chance(script, machine):
    machine.fails[2] = "timed out: after 5 s"
    make(script, timeout=5.0).run()
    for timeout, again in ((5.0, []), (9.0, [ALL[2]])):
        machine.ran.clear()
        make(script, timeout=timeout, resume=True).run()
        assert machine.ran == again


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": 3}, "steps before: none, now: 3"),
        ({"arguments": ["--lr", "1"]}, "arguments before: none, now: --lr 1."),
        ({"seeds": 1}, "seeds before: 2, now: 1"),
        ("the script", "script_sha256 before:"),
    ],
)
def test_another_sweep_cannot_go_on_in_its_place(change, said, script, machine):
    make(script).run()
    before = read_results("out")
    if change == "the script":
        with open(script, "a") as file:
            file.write("# edited\n")
        change = {}
    with pytest.raises(ValueError, match="it is another sweep") as refused:
        make(script, resume=True, **change)
    assert said in str(refused.value)
    assert read_results("out") == before


def test_given_rows_are_run_alone_and_may_be_added_later(script, machine):
    """As a search does, which runs one candidate after another in one directory."""
    base, whole = Case("O0"), Case("O3", "bfloat16")
    cured = dataclasses.replace(whole, settings=(("overrides", {"head": "float"}),))
    first = Sweep(script, rows=[base, whole], rounds=1, out="out").run()
    assert first.cases == [base, whole] and machine.ran == ["O0 seed 0", "O3-bfloat16 seed 0"]

    machine.ran.clear()
    rows = [base, whole, cured]
    grown = Sweep(script, rows=rows, seeds=2, rounds=1, out="out", resume=True).run()

    assert machine.ran == [
        "O0 seed 1", f"{cured.label} seed 0", f"{cured.label} seed 1", "O3-bfloat16 seed 1",
    ]  # fmt: skip
    assert [row.runs for row in grown.rows] == [2, 2, 2]
    assert [run.case for run in read_runs("out", cured.label)] == [cured, cured]

    machine.ran.clear()  # a search that goes on names them anew, one after the other
    fewer = Sweep(script, rows=rows[:2], seeds=2, rounds=1, out="out", resume=True).run()
    assert [row.runs for row in fewer.rows] == [2, 2]
    assert {run.case for run in read_sweep("out").runs} == {base, whole}  # pages show rows alone
    again = Sweep(script, rows=rows, seeds=2, rounds=1, out="out", resume=True).run()
    assert [row.runs for row in again.rows] == [2, 2, 2] and not machine.ran


def test_a_row_with_fewer_seeds_runs_no_more_and_may_have_more_later(script, machine):
    rows = [Case("O0"), Case("O3", "bfloat16")]
    asked = {"rows": rows, "seeds": 3, "rounds": 1, "out": "out"}
    sweep = Sweep(script, fewer_seeds={rows[1]: 2}, **asked).run()
    assert [row.runs for row in sweep.rows] == [3, 2] and len(machine.ran) == 5
    sweep = Sweep(script, resume=True, **asked).run()
    assert [row.runs for row in sweep.rows] == [3, 3] and len(machine.ran) == 6


def test_a_recommendation_is_for_the_kind_of_script(script, machine, monkeypatch):
    kinds = []
    monkeypatch.setattr(collected_runs, "recommendation", lambda *args: kinds.append(args[1]) or "")
    kind = Kind(NO_AMP)
    Sweep(script, rows=[Case("O0")], kind=kind, rounds=1, out="out").run()
    assert set(kinds) == {kind}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rows": []}, "nothing to run. Expected cases, such as Case"),
        ({"levels": []}, "nothing to run.\nExpected some of"),
        ({"rows": [Case("O0")], "levels": "O0"}, "expected the cases alone, without levels"),
    ],
)
def test_rows_that_say_nothing_or_too_much(options, said, script):
    with pytest.raises(ValueError, match=said):
        Sweep(script, out="out", **options)


def test_a_sweep_is_replaced_only_on_request(script, machine, tmp_path):
    make(script).run()
    mine = ("mine.txt", "runs/mine.json", "runs/O7.seed0.repeat0.log", "plots/mine.png")
    of_a_report = ("report.html", "plots/speed.png", "tensorboard/O0.seed0.repeat0/events.1")
    for name in (*mine, *of_a_report):
        write(tmp_path / "out" / name, "")
    with pytest.raises(ValueError, match=r"holds a sweep of train.py .*, 4 of 4 runs.*--overwrite"):
        make(script)
    assert len(list((tmp_path / "out/runs").iterdir())) == 6

    plan = Sweep(script, levels=["O0"], out="out", overwrite=True)

    left = {str(path.relative_to("out")) for path in plan.directory.rglob("*") if path.is_file()}
    left -= {"summary.json", "summary.csv", "summary.md", "summary.tex", ".lock"}
    assert left == set(mine)
    assert read_results("out").done == 0 and list(read_runs("out")) == []


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize(
    "files",
    [
        {"report.html": "my page", "summary.csv": "a,b", "plots/mine.png": "mine"},
        {"notes/": None},
        {"summary.json": '{"accuracy": 0.5}', "report.html": "my page"},
        {"summary.json": "[1, 2"},
        {"summary.json": '{"format": 4, "files": ["../mine.txt"]}'},
        {"summary.json": '{"format": 3, "script": "train.py"}', "runs/O0.seed0.repeat0.json": "{}"},
    ],
)
@pytest.mark.parametrize("way", [{}, {"overwrite": True}, {"resume": True}])
def test_a_folder_with_files_of_ones_own_is_refused_as_it_is(files, way, script, machine, tmp_path):
    """For a tuning too, whose folder is a sweep's."""
    for name, text in files.items():
        if name.endswith("/"):
            (tmp_path / "own" / name).mkdir(parents=True)
        else:
            write(tmp_path / "own" / name, text)
    (tmp_path / "link").symlink_to("own")
    before = contents(tmp_path / "own")
    for out in ("own", "link", tmp_path / "own"):
        with pytest.raises(ValueError, match="--out|Leave --resume out"):
            make(script, out=out, **way)
        with pytest.raises(ValueError, match="--out|Leave --resume out"):
            Tuning(script, opt_level="O1", out=out, **way)
    assert contents(tmp_path / "own") == before and not machine.ran


@pytest.mark.parametrize("out", ["", " "])
def test_an_empty_out_is_an_error(out, script, machine, tmp_path):
    for begin in (make, lambda script, out: Tuning(script, opt_level="O1", out=out)):
        with pytest.raises(ValueError, match="--out '': expected the name of a folder"):
            begin(script, out=out)
    assert contents(tmp_path) == {"train.py": SCRIPT}


def test_a_folder_in_which_nothing_was_recorded_yet_can_be_used(script, machine, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/.lock").touch()  # left by a sweep that was killed as it began
    assert make(script).run().results.complete


def test_a_file_beside_a_sweep_is_not_taken_for_a_tunings_answer(script, machine, tmp_path):
    make(script, seeds=4).run()
    (tmp_path / "out/tune.json").write_text("mine")
    for way in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(ValueError, match=r"tune.json: was not written|holds a sweep"):
            Tuning(script, opt_level="O1", out="out", **way)
    assert (tmp_path / "out/tune.json").read_text() == "mine" and read_results("out").done == 8


def test_a_tuning_goes_on_with_its_options_and_arguments(script, machine):
    options = {"opt_level": "O1", "out": "out"}
    Tuning(script, ["--lr", "1"], seeds=4, margin="20%", **options)
    gc.collect()  # lets the folder go
    said = []
    Tuning(script, seeds=6, resume=True, say=said.append, **options)
    assert said == [
        "Resumes the tuning in its folder, and keeps its settings: --margin 20% -- --lr 1."
    ]
    kept = read_results("out")
    assert kept.options["margin"] == "20%" and kept.settings["seeds"] == 6


def test_the_default_folder_is_one_that_is_free(script, machine, tmp_path):
    write(tmp_path / "ampatch-sweep/train/mine.txt", "mine")
    plans = [make(script, out=None).run() for _ in range(2)]
    assert [plan.directory.name for plan in plans] == ["train-2", "train-3"]
    assert {str(plan.directory.parent) for plan in plans} == {"ampatch-sweep"}
    assert make(script, out=None, resume=True).directory == plans[1].directory


def test_two_sweeps_do_not_share_a_directory(script, machine):
    first = make(script)
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(ValueError, match="another sweep is running in this directory"):
            make(script, **options)
    first.run()
    make(script, resume=True).close()


def test_a_disk_that_fills_up_ends_the_sweep_and_keeps_what_there_is(script, machine):
    machine.fails[1] = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space left"):
        make(script).run()
    assert len(list(read_runs("out"))) == read_results("out").done == 1
    make(script, resume=True).close()  # the lock was let go


def test_a_sweep_times_what_went_well_and_can_add_rounds(script, machine):
    options = {"levels": ["O0", "O3"], "seeds": 1, "rounds": None}
    machine.fails[1] = "timed out: after 5 s"
    first = make(script, **options).run()
    ran = machine.steps
    timed = ("again", "repeat 1 again", "repeat 1", "repeat 2", "repeat 2 again")
    assert ran[:2] == [("O0 seed 0", None), ("O3-float16 seed 0", None)]
    assert ran[2:] == [(f"O0 seed 0 {name} (timing)", 300) for name in timed]
    assert first.results.complete and first.results.planned == 7
    ran.clear()
    more = make(script, resume=True, **{**options, "rounds": 4}).run()
    again, once = (f"O0 seed 0 repeat 3{name} (timing)" for name in (" again", ""))
    assert [label for label, _ in ran] == [again, once]
    assert more.rows[0].speeds.n == 4 and read_results("out") == more.results
    with pytest.raises(ValueError, match="rounds before: 4, now: 3"):  # some would be left out
        make(script, resume=True, **{**options, "rounds": 3})
    make(script, resume=True, **options).close()  # without a number it has those that it had
    ran.clear()
    make(script, steps=50, overwrite=True, **options).run()
    assert {steps for _, steps in ran} == {50}  # a short run is no longer than a whole one


def test_the_default_dtypes_are_those_that_doctor_calls_fast(script, machine, monkeypatch):
    """Also after `--resume` on a day on which doctor would call others so."""
    answers = []
    monkeypatch.setattr(half_dtypes, "half_speeds", lambda device: answers.pop())
    monkeypatch.setattr(half_dtypes, "accelerator", lambda: None)
    for fast, expected in (((), "bfloat16"), (("float16",), "float16")):
        answers.append(HalfSpeeds(fast, {"bfloat16": 0.9}, {"bfloat16": 1.0}))
        plan = make(script, dtypes=None, overwrite=True).run()
        assert [case.dtype for case in plan.cases] == [None, expected]
    again = make(script, dtypes=None, resume=True)
    again.close()
    assert again.cases == plan.cases and answers == []
    make(script, levels=["O0"], dtypes=None, overwrite=True).close()  # needs to ask nobody
