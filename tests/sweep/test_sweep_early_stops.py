"""Sweeps that end early, because every other run would go the same way."""

import json

import pytest
from sweep_runs import INITIALIZE, PLAIN, TRAINING, Said, log_of, planned

from ampatch.sweep import Case, Run, SweepError, Trial
from ampatch.sweep.execution.early_stops import failure, lacks_memory, reason_to_stop
from ampatch.sweep.measure.run_record import Measured

pytestmark = pytest.mark.usefixtures("warm_trials")

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
def test_an_o0_that_does_not_end_well_ends_the_sweep_whatever_steps_it_took(
    ending, options, said, tmp_path
):
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
    assert (
        "The script may catch its errors." in said and "skipped: a batch that is too large" in said
    )


def test_each_trial_has_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = "'{trial_dir}' if os.environ['AMPATCH_TRIAL_DIR'] == '{trial_dir}' else None"
    plan = planned(tmp_path, RESUMING, place, **OF_TWO).run()
    assert [(row.status, row.steps) for row in plan.rows] == [("ok", 9), ("ok", 9)]
    kept = sorted(plan.directory.glob("runs/*.dir/checkpoint.json"))
    assert [path.parent.name for path in kept] == [
        "O0.seed0.repeat0.dir",
        "O1-bfloat16.seed0.repeat0.dir",
    ]
    (plan.directory / "runs/O0.seed0.repeat0.json").unlink()  # as after a kill in its middle
    assert planned(tmp_path, RESUMING, place, resume=True, **OF_TWO).run().rows[0].steps == 9
    planned(tmp_path, RESUMING, place, overwrite=True).close()
    assert not list(plan.directory.glob("runs/*"))


def test_a_failure_without_output_says_so(tmp_path):
    log = tmp_path / "run.log"
    log.write_text("\n")
    run = Run(Trial(Case("O1", "float16")), 0, 1.0, None, ended_by="timed out: after 15 s")
    assert failure(run, log) == "O1-float16 seed 0 timed out: after 15 s. It printed nothing."
