"""The sweep, with real scripts in real processes: their ends, early ones, and their files."""

import json
import math
import os
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from sweep_runs import INITIALIZE, PLAIN, TRAINING, Said, log_of, planned, written

from ampatch.sweep import Case, Run, Sweep, SweepError, Trial, read_results, read_runs, sweep
from ampatch.sweep.execution import user_files
from ampatch.sweep.execution.early_stops import failure_text, lacks_memory, reason_to_stop
from ampatch.sweep.measure.run_record import Measured
from ampatch.sweep.report.provenance import script_command

pytestmark = pytest.mark.usefixtures("warm_trials")


@pytest.fixture(scope="module")
def good(warm_trials, tmp_path_factory):
    """O0, O1 and O2 of a script that writes down for itself what a sweep should find."""
    folder = tmp_path_factory.mktemp("good")
    script = """
        losses = [step() for _ in range(40)]
        amp.log_metrics(answer=len(losses) + 0.5)
        print("the script says", sys.argv[1:], file=sys.stderr)
        with open(f"{sys.argv[1]}/{level}.oracle", "w") as file:
            json.dump(losses, file)
    """
    parts = "".join(map(textwrap.dedent, (TRAINING, INITIALIZE, script)))
    options = {"levels": ["O0", "O1", "O2"], "autocast": False}
    return planned(folder, parts, str(folder), "--x", **options).run()


def test_losses_and_figures_are_those_the_script_saw_at_the_level_asked_for(good):
    for run, row, level in zip(good.runs, good.rows, ("O0", "O1", "O2"), strict=True):
        oracle = json.loads((good.directory.parent / f"{level}.oracle").read_text())
        assert run.measured.losses["0"].values == oracle
        assert run.measured.losses["0"].steps == list(range(40))
        assert row.first_loss == pytest.approx(sum(oracle[:2]) / 2)
        assert row.last_loss == pytest.approx(sum(oracle[-2:]) / 2)
        assert row.last_loss < row.first_loss
        assert (row.status, row.steps, row.skipped, row.loss_scale) == ("ok", 40, 0, 1.0)
        assert row.metrics == {"answer": 40.5}
        assert 0 < row.step_ms < 1000 and row.cpu_ms > 0
        assert run.measured.machine["threads"] >= 1
        assert 50 * 2**20 < row.memory_bytes < 5000 * 2**20
        assert (run.measured.device, row.memory_kind) == ("cpu", "resident")
        half = "float32" if level == "O0" else "bfloat16"
        assert (run.measured.opt_level, row.opt_level, row.dtype) == (level, level, half)
        assert level == "O0" or run.measured.properties["dtype"] == "torch.bfloat16"
    base, *others = good.rows
    assert [row.speed for row in others] == [base.step_ms / row.step_ms for row in others]
    assert (base.speed, [row.pace for row in others]) == (None, ["too few rounds"] * 2)


def test_the_files_say_what_the_rows_say(good):
    data = json.loads((good.directory / "summary.json").read_text())
    assert data["complete"] is True and data["arguments"][1] == "--x"
    assert data["rows"][1]["last_loss"] == good.rows[1].last_loss
    assert list(read_runs(good.directory, "O1-bfloat16")) == [good.runs[1]]
    assert read_results(good.directory) == good.results
    assert "the script says" in log_of(good, "O2-bfloat16")


ENDINGS = """
    import atexit, threading

    if (level, dtype) == ("O2", "float16"):
        model, optimizer = amp.initialize(model, optimizer, loss_scale="dynamic")
        for factor in (1, 1, 1e8, 1):
            step(factor)
        amp.deactivate()
        sys.exit()
    model, optimizer = amp.initialize(model, optimizer, loss_scale=1.0)
    if level == "O0":
        def train():
            threading.main_thread().join()  # Python waits for this thread at its end
            step(), step()
        threading.Thread(target=train).start()
        atexit.register(lambda: amp.log_metrics(answer=2.5))
        sys.exit()
    step(), step()
    if (level, dtype) == ("O1", "float16"):
        sys.exit(3)
    if level == "O1":
        raise RuntimeError("the tensor is\\nnot what it was")
    if level == "O2":
        step(float("nan"))
    if (level, dtype) == ("O3", "float16"):
        os.kill(os.getpid(), 9)
    if level == "O3":
        atexit.register(os.abort)
"""


def test_each_way_to_end_is_a_row(tmp_path):
    """None of them ends the sweep; what runs after the script's last line counts."""
    script = textwrap.dedent(TRAINING) + textwrap.dedent(ENDINGS)
    plan = planned(tmp_path, script, dtypes=["float16", "bfloat16"], autocast=False, seeds=1).run()
    rows = plan.rows
    assert [(row.status, row.steps) for row in rows] == [
        ("ok", 2),
        ("exit status 3", 2),
        ("crashed: RuntimeError: the tensor is", 2),
        ("ok", 4),
        ("diverged at step 3: loss nan", 3),
        ("killed: by SIGKILL (out of memory?)", 0),
        ("killed: by SIGABRT after its record was written", 2),
    ]
    assert rows[0].metrics == {"answer": 2.5}
    assert (rows[3].skipped, rows[3].loss_scale) == (1, 2.0**15)  # an overflow is no trouble
    assert math.isnan(rows[4].last_loss)
    log = log_of(plan, "O1-bfloat16")
    assert log.startswith('Traceback (most recent call last):\n  File "' + plan.script)
    assert "Fatal Python error: Aborted" in log_of(plan, "O3-bfloat16")  # no traceback says where
    text = (plan.directory / "summary.json").read_text()
    assert "NaN" not in text and json.loads(text)["rows"][4]["last_loss"] == "nan"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (TRAINING + INITIALIZE, "took no step: the optimizer that ampatch.initialize was given"),
        (
            TRAINING + INITIALIZE.replace("loss_scale=1.0", "enabled=False") + "\n    step()\n",
            "no training: calls ampatch.initialize with enabled=False",
        ),
        (  # the forked process ends as Python does
            "import os\nif os.fork():\n    os.wait()\n    os._exit(0)",
            "no record: ended with code 0, as by os._exit; sys.exit leaves one",
        ),
    ],
)
def test_a_script_that_does_not_train(tmp_path, body, expected):
    [row] = sweep(written(tmp_path, body), levels=["O0"], out=tmp_path / "out")
    assert row.status.startswith(expected)
    assert (row.step_ms, row.speed, row.steps) == (None, None, 0)


def test_a_run_that_hangs_is_ended_and_keeps_what_it_measured(tmp_path, monkeypatch):
    """The sweep's clock stands still but for one jump, when all is trained.

    So a slow machine changes nothing.  Each second step is followed by an evaluation that takes
    five times as long as a step, which is no part of the time of a step.
    """
    hangs = tmp_path / "hangs"
    waits = {"sleep": time.sleep, "time": time.time}
    clock = SimpleNamespace(monotonic=lambda: 301.0 * hangs.exists(), **waits)
    monkeypatch.setattr("ampatch.sweep.execution.runner.time", clock)
    body = f"""
        for _ in range(4):
            for _ in range(2):
                time.sleep(0.02)
                step()
            time.sleep(0.1)
            amp.log_metrics(epochs=1)
        open({str(hangs)!r}, "w").close()
        time.sleep(600)
    """
    script = written(tmp_path, TRAINING, INITIALIZE, body)
    [row] = sweep(script, levels=["O0"], timeout=300, out=tmp_path / "out")
    assert (row.status, row.steps, row.seconds) == ("timed out: after 300 s", 8, 301.0)
    assert 20 <= row.step_ms < 60  # 70, with evaluations


def test_the_script_finds_itself_as_python_would_run_it(tmp_path):
    """Modules beside it, `__main__` for pickling, workers that import it again."""
    (tmp_path / "beside.py").write_text("word = 'found'")
    script = """
        import multiprocessing, os, pickle, sys
        import beside

        class Thing:
            pass

        def work(x):
            return x + 1

        if __name__ == "__main__":
            assert sys.path[0] == os.path.dirname(os.path.realpath(__file__)), sys.path
            assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(beside.word, sys.argv[1:], pool.map(work, [1]))
    """
    plan = planned(tmp_path, script, "--", "-x", levels=["O0"]).run()
    assert log_of(plan) == "found ['--', '-x'] [2]\n"


def test_a_module_as_by_python_m(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    training = textwrap.dedent(TRAINING) + textwrap.dedent(INITIALIZE)
    (package / "train.py").write_text(
        f"from . import __name__ as package\n{training}"
        "losses = [step() for _ in range(3)]\nprint(package, __name__, sys.argv[1:])\n"
    )
    monkeypatch.chdir(tmp_path)
    swept = Sweep("package.train", ["--lr", "1"], module=True, levels=["O0"])
    assert "package" not in sys.modules
    [row] = swept.run().rows
    assert (row.status, row.steps) == ("ok", 3)
    assert swept.directory == Path("ampatch-sweep/package.train")
    assert log_of(swept) == "package __main__ ['--lr', '1']\n"
    results = read_results(swept.directory)
    assert results.script == "-m package.train"
    assert script_command(results) == "-m package.train --lr 1"


# Sweeps that end early, because every other run would go the same way


RESUMING = f"""
    {TRAINING}
    from pathlib import Path
    saved = Path(eval(sys.argv[1])) / "checkpoint.json"
    model, optimizer = amp.initialize(model, optimizer)
    for _ in range(json.loads(saved.read_text()) if saved.exists() else 0, 9):
        step()
    saved.write_text("9")
"""
OF_TWO = {"levels": ["O0", "O1"], "autocast": False}


def stopped(plan):
    """What the sweep says when it ends, which it does after one run that did not train."""
    with pytest.raises(SweepError) as stop:
        plan.run()
    return str(stop.value)


def test_without_o0_a_script_without_initialize_ends_at_its_first_step(tmp_path):
    script = PLAIN.replace("loss.backward()", "loss.backward(), print('before the step')")
    plan = planned(tmp_path, script, levels=["O1", "O2"], autocast=False)
    said = stopped(plan)
    reason, line = "never calls ampatch.initialize", "model, optimizer = ampatch.initialize("
    assert said.index(reason) < said.index(line) < said.index("With O0 among --levels")
    assert log_of(plan, "O1-bfloat16") == "before the step\n"
    assert len(plan.runs) == 1
    assert plan.results.recommendation.startswith("Nothing to compare yet")


def test_a_script_that_refuses_its_arguments_gets_the_place_of_these(tmp_path):
    run = Run(Trial(Case("O0")), 2, 1.0, Measured())
    said = reason_to_stop("train.py", [], run, tmp_path / "no.log")
    assert "Arguments of the script stand after --: ampatch sweep SCRIPT -- ARGUMENTS." in said


def test_a_script_that_cannot_start_is_started_once_and_again_when_that_is_mended(tmp_path):
    script = "import beside" + RESUMING.replace("\n    ", "\n")
    plan = planned(tmp_path, script, "'{trial_dir}'", **OF_TWO)
    said = stopped(plan)
    assert "at O0 seed 0, before its first step" in said
    assert "ModuleNotFoundError: No module named 'beside'" in said
    assert len(plan.runs) == 1
    (tmp_path / "beside.py").write_text("")
    plan = planned(tmp_path, script, "'{trial_dir}'", resume=True, **OF_TWO).run()
    assert [row.status for row in plan.rows] == ["ok", "ok"]
    assert json.loads((plan.directory / "summary.json").read_text())["complete"] is True


@pytest.mark.parametrize(
    ("ending", "options", "said"),
    [
        ("sys.exit(3)", {}, "exit status 3 at O0"),
        ("raise RuntimeError('no data')", {}, "crashed: RuntimeError: no data at O0"),
        ("sys.excepthook = lambda *_: sys.exit('no disk'); 1 / 0", {}, "crashed: no disk at O0"),
        ("time.sleep(60)", {"timeout": 4}, "timed out: after 4 s at O0"),
    ],
)
def test_an_o0_that_does_not_end_well_ends_the_sweep_at_once(ending, options, said, tmp_path):
    script = f"{TRAINING}{INITIALIZE}    step(), step()\n    {ending}\n"
    plan = planned(tmp_path, script, **OF_TWO, **options)
    message = stopped(plan)
    assert f"{said} seed 0, after 2 steps" in message and "are compared with O0" in message
    assert ("--resume --timeout" in message) == bool(options)
    assert len(plan.runs) == 1
    assert plan.results.recommendation == f"Nothing to compare yet: {said}."


def test_what_does_not_fit_at_o0_may_fit_in_half(tmp_path):
    script = RESUMING.replace(
        "    model, opt",
        "    if os.environ['AMPATCH_OPT_LEVEL'] == 'O0': raise MemoryError()\n    model, opt",
    )
    plan = planned(tmp_path, script, "os.environ['AMPATCH_TRIAL_DIR']", **OF_TWO).run()
    assert [row.status for row in plan.rows][1:] == ["ok"] and len(plan.runs) == 2
    assert lacks_memory("crashed: torch.OutOfMemoryError: no room")


def test_a_script_that_goes_on_from_its_own_file_is_recognised(tmp_path):
    plan = planned(tmp_path, RESUMING, repr(str(tmp_path)), **OF_TWO)
    plan.run(shown := Said())
    [said] = [event for event in shown.events if "O1-bfloat16 seed 0 took no step" in event]
    assert "The script may resume from a file that was there before" in said
    assert "{trial_dir}" in said and "AMPATCH_TRIAL_DIR" in said
    assert not any("several machines" in note for note in plan.results.notes)
    said = stopped(planned(tmp_path, RESUMING, repr(str(tmp_path)), overwrite=True))  # it is there
    assert "a file that was there before" in said and "{trial_dir}" in said


def test_a_row_that_swallows_its_errors_is_marked_and_the_others_run(tmp_path):
    """As scripts do that skip a batch without enough memory."""
    script = f"""
    {TRAINING.replace('["AMPATCH_OPT_LEVEL"]', '.get("AMPATCH_OPT_LEVEL")')}
    {INITIALIZE.replace("O3", "O2").replace(", loss_scale=1.0", "")}
    for _ in range(9):
        try:
            if level == "O2":
                raise RuntimeError("a batch that is too large")
            step()
        except RuntimeError as error:
            print("skipped:", error)
    """
    plan = planned(tmp_path, script, levels=["O0", "O2"], seeds=2)
    plan.run(shown := Said())
    base, row, autocast = plan.rows
    assert (base.status, autocast.status, autocast.steps) == ("ok", "ok", 9)
    assert row.status.startswith("took no step") and (row.outcome, row.runs) == ("failed", 1)
    [said] = [event for event in shown.events if "took no step" in event]
    assert "The script may catch its errors." in said
    assert "skipped: a batch that is too large" in said


def test_each_trial_has_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = "'{trial_dir}' if os.environ['AMPATCH_TRIAL_DIR'] == '{trial_dir}' else None"
    plan = planned(tmp_path, RESUMING, place, **OF_TWO).run()
    assert [(row.status, row.steps) for row in plan.rows] == [("ok", 9), ("ok", 9)]
    kept = sorted(plan.directory.glob("runs/*.dir/checkpoint.json"))
    names = [path.parent.name for path in kept]
    assert names == ["O0.seed0.repeat0.dir", "O1-bfloat16.seed0.repeat0.dir"]
    (plan.directory / "runs/O0.seed0.repeat0.json").unlink()  # as after a kill in its middle
    assert planned(tmp_path, RESUMING, place, resume=True, **OF_TWO).run().rows[0].steps == 9
    planned(tmp_path, RESUMING, place, overwrite=True).close()
    assert not list(plan.directory.glob("runs/*"))


def test_a_failure_without_output_says_so(tmp_path):
    log = tmp_path / "run.log"
    log.write_text("\n")
    run = Run(Trial(Case("O1", "float16")), 0, 1.0, None, ended_by="timed out: after 15 s")
    assert failure_text(run, log) == "O1-float16 seed 0 timed out: after 15 s. It printed nothing."


# Files that trials write, and copies of the folder in which they run


SAVES = f"""
    {TRAINING}
    {INITIALIZE}
    print("found", sorted(os.listdir(".")), open("data/input.txt").read())
    step(), step()
    torch.save(model.state_dict(), "best.pt")
    os.makedirs("runs/a", exist_ok=True)
    for name in ("runs/log.txt", "runs/a/log.txt"):
        open(name, "w").write(level)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The user's folder, with weights of the user's own and something to read."""
    monkeypatch.chdir(tmp_path)
    Path("best.pt").write_text("the user's own")
    Path("data").mkdir()
    Path("data/input.txt").write_text("input")
    Path(".git").mkdir()
    Path(".git/HEAD").write_text("main")
    return tmp_path


def test_files_that_o0_has_written_are_named_once(folder):
    sweep = planned(folder, SAVES, levels=["O0", "O1"], autocast=False).run()
    [note] = [note for note in sweep.results.notes if "has written" in note]
    assert note.startswith("O0 has written best.pt, runs/...: trials overwrite one another's ")
    assert "(-- --out {trial_dir}/best.pt), or run each trial in a copy" in note
    assert sweep.runs[0].wrote == ["best.pt", "runs/..."] and not sweep.runs[1].wrote


def test_a_script_elsewhere_and_one_that_writes_nothing(folder, tmp_path_factory):
    quiet = planned(folder, TRAINING + INITIALIZE + "    step()", levels=["O0"]).run()
    assert quiet.runs[0].wrote == [] and not any("written" in note for note in quiet.results.notes)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    beside = "open(os.path.join(os.path.dirname(__file__), 'beside.txt'), 'w')"
    script = written(elsewhere, TRAINING, INITIALIZE, "step()\n", beside)
    sweep = Sweep(script, levels=["O0"], rounds=1, out=folder / "other").run()
    assert sweep.runs[0].wrote == [os.path.relpath(elsewhere / "beside.txt")]


def test_in_a_copy_the_folder_stays_as_it_is(folder):
    options = {"levels": ["O0", "O1"], "autocast": False, "in_copy": True}
    sweep = planned(folder, SAVES, **options).run()
    assert [run.exit_code for run in sweep.runs] == [0, 0]
    assert "found ['.git', 'best.pt', 'data', 'train.py'] input" in log_of(sweep)
    assert sorted(os.listdir()) == [".git", "best.pt", "data", "out", "train.py"]
    assert Path("best.pt").read_text() == "the user's own"
    for label, level in (("O0", "O0"), ("O1-bfloat16", "O1")):
        copy = sweep.directory / f"runs/{label}.seed0.repeat0.copy"
        names = sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file())
        assert names == ["best.pt", "runs/a/log.txt", "runs/log.txt"]
        assert (copy / "runs/log.txt").read_text() == level
    [note] = [note for note in sweep.results.notes if "in a copy" in note]
    assert note.endswith(
        "stays in runs/*.copy. Hidden folders, links and large entries are linked, not copied: "
        ".git."
    )


def test_trials_beside_each_other_run_in_copies(folder):
    """A script that saves its best weights and loads them at its end gets its own."""
    script = f"""
    {TRAINING}
    {INITIALIZE}
    own = level + os.environ["AMPATCH_SEED"]
    step()
    open("best.txt", "w").write(own)
    time.sleep(0.5)
    assert open("best.txt").read() == own
    step()
    """
    options = {"levels": ["O0", "O1"], "autocast": False, "seeds": 2, "jobs": 2}
    sweep = planned(folder, script, **options).run()
    assert [run.exit_code for run in sweep.runs] == [0] * 4 and not Path("best.txt").exists()
    shared = {**options, "in_copy": False, "overwrite": True, "levels": ["O0"], "seeds": 1}
    planned(folder, script, **shared).run()
    assert Path("best.txt").read_text() == "O00"


def test_what_is_large_or_hidden_is_linked_and_a_copy_leaves_what_is_new(folder, monkeypatch):
    monkeypatch.setattr(user_files, "MIN_LINKED_BYTES", 5)
    Path("small").mkdir()
    Path("small/a").write_text("1234")
    Path("link").symlink_to("data")
    assert user_files.linked_entries(folder, folder / "out") == [".git", "best.pt", "data", "link"]
    with user_files.copy_of(folder, folder / "copy", folder / "copy"):
        assert Path("copy/data/input.txt").read_text() == "input"
        assert Path("copy/small/a").read_text() == "1234" and not Path("copy/small").is_symlink()
        Path("copy/small/b").write_text("new")
    assert [*Path("copy").rglob("*")] == [Path("copy/small"), Path("copy/small/b")]
    assert Path("data/input.txt").exists() and Path("small/a").exists()


def test_only_this_machine_copies(folder):
    pytest.importorskip("ray")
    with pytest.raises(ValueError, match="--in-copy: has no meaning with --engine ray"):
        planned(folder, TRAINING, in_copy=True, engine="ray")
