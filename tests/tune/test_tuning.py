"""The course of a tuning, and its answers, with trials whose outcome is given."""

import collections
import dataclasses
import fnmatch
import io
import json
import math
from pathlib import Path

import pytest
from sweep_made import trained

from ampatch.cli import main
from ampatch.sweep import read_results
from ampatch.sweep.json_files import write_json
from ampatch.sweep.kinds import UNKNOWN_KIND
from ampatch.sweep.options import SweepOptions
from ampatch.sweep.report.results import Results
from ampatch.sweep.trial import BASE, Trial
from ampatch.tune import TuneError, Tuning, read_answer
from ampatch.tune.answer import Answer
from ampatch.tune.module_call import CallErrors
from ampatch.tune.probe import ProbeOptions
from ampatch.tune.report import summary, table_rows, troubles, write_terminal
from ampatch.tune.sensitivity import Findings, Sensitivity

SPREAD = 0.01  # between seeds
MODULES = ("stem", "body", "body.norm", "head")
BY_LUCK = (0.3, 0.1, -0.05, 0.3, 0.3, 0.3)  # losses above O0's: three seeds do not show it


class Trials:
    """In the place of `Sweep`: a case trains well if one of the `cures` is in place, as does O0.

    With one of `lucky` alone it trains worse, which few seeds do not show.
    """

    def __init__(self, cures, noise, lucky):
        self.cures, self.lucky, self.noise = set(cures), set(lucky), noise
        self.probed, self.seeds, self.kind = [], collections.Counter(), UNKNOWN_KIND
        self.probe_ends = {}

    def __call__(self, script, arguments, *, rows, out, probe=None, **options):
        Path(out).mkdir(parents=True, exist_ok=True)
        self.last = asked = SweepOptions(rows=rows, **options)
        kept = {"options": asked.to_record(options), "files": list(asked.files)}
        record = Results("train.py", list(arguments), "", 0, {"dtypes": []}, {}, **kept)
        write_json(Path(out) / "summary.json", record)
        if probe is not None:
            asked = ProbeOptions(**json.loads(probe[1]))
            self.probed.append(asked)
            sample = CallErrors(0.1, 0.1, 0.0, 0.0)
            modules = [Sensitivity(path, "Linear", (sample,)) for path in MODULES]
            findings = Findings(asked.steps, modules=modules, paths=list(MODULES), eps=[1e-8])
            findings.write(Path(asked.file))
        every = range(self.last.seeds or 1)
        tried = [(case, n) for case in rows for n in every[: self.last.fewer_seeds.get(case)]]
        self.runs = [self.run_of(case, seed) for case, seed in tried]
        self.seeds |= collections.Counter(run.case for run in self.runs)
        if probe is not None:
            self.runs = [dataclasses.replace(self.runs[0], **self.probe_ends)]
        self.rows, self.directory = [], Path(out)
        return self

    def run_of(self, case, seed):
        above = [0.0 if case == BASE else self.noise * (-1) ** n for n in range(seed + 1)]
        is_good = self.has(case, self.cures)
        if not is_good and self.has(case, self.lucky):
            is_good, above = True, BY_LUCK
        first = 0.5 + SPREAD * seed if is_good else math.nan
        return trained(Trial(case, seed), [first] + [first + above[seed]] * 39)

    def run(self, progress=None):
        return self

    def has(self, case, remedies):
        settings = dict(case.settings)
        globs = json.loads(settings.get("overrides", "{}"))
        in_place = {*settings, case.opt_level}
        in_place |= {path for path in MODULES for glob in globs if fnmatch.fnmatchcase(path, glob)}
        return case == BASE or bool(in_place & remedies)


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")

    def tune(cures, level="O3", noise=0.0, lucky=(), probe_ends=None, **options):
        trials = Trials(cures, noise, lucky)
        trials.probe_ends |= probe_ends or {}
        monkeypatch.setattr("ampatch.tune.candidate_sweep.Sweep", trials)
        tuning = Tuning(str(script), out=tmp_path / "out", opt_level=level, **options)
        return tuning.run(), trials

    return tune


def test_one_module_is_the_answer_which_has_all_seeds(tuned, tmp_path):
    said = []
    answer, trials = tuned(["head"], say=said.append)
    assert said[0] == "O3-float16 fails: diverged at step 1: loss nan"
    assert (answer.outcome, answer.needed, answer.settings) == ("cured", ["head"], {})
    assert answer == read_answer(tmp_path / "out")
    seeds = {case.label: count for case, count in trials.seeds.items()}
    assert seeds.pop("O0") == seeds.pop('O3-float16-overrides={"head": "float"}') == 6
    assert set(seeds.values()) == {3}  # what was only tried


@pytest.mark.parametrize("where", ({}, {"jobs": 4}, {"devices": "cpu:0,cpu:1"}, {"engine": "ray"}))
def test_what_is_timed_runs_alone(tuned, where, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    _, trials = tuned(["head"], **where)
    assert not trials.last.seeds and trials.last.rounds and not trials.last.side_by_side


def test_a_setting_is_the_answer_where_no_module_is(tuned):
    answer, _ = tuned(["master_weights"])
    assert answer.settings == {"master_weights": True} and answer.overrides == {}
    assert "The cause is no module, it is half weights" in summary(answer)[0]


def test_a_level_that_passes_is_answered_at_once_and_leaves_no_older_answer(tuned, tmp_path):
    tuned(["head"])
    assert (tmp_path / "out/overrides.json").exists()
    answer, trials = tuned(["O3"], seeds=4)
    assert answer.outcome == "passes" and answer.candidates == 0 and not trials.probed
    assert set(trials.seeds.values()) == {4}
    assert not (tmp_path / "out/overrides.json").exists()


@pytest.mark.parametrize("lucky", ("O3", "body"))
def test_what_passed_with_few_seeds_alone_is_no_answer(tuned, lucky):
    said = []
    answer, trials = tuned(["head"], lucky=[lucky], say=said.append)
    assert (answer.outcome, answer.needed) == ("cured", ["head"])
    assert answer.is_smallest and max(trials.seeds.values()) == 6
    again = [line for line in said if "3 seeds are too few here" in line]
    assert len(again) == (lucky == "body"), said


@pytest.mark.parametrize("cures", (["O3"], ["head"]))
def test_a_difference_that_matters_and_would_have_gone_unseen_is_said(tuned, cures):
    """So does a sweep, which recommends nothing then."""
    answer, _ = tuned(cures, noise=0.01)
    said = " ".join(summary(answer))
    assert said.startswith("Not known yet whether ") and answer.outcome == "undecided"
    assert ": with 6 seeds the 95 % interval of its last loss reaches" in said
    assert "beyond the margin of 0.0053 (--margin)" in said and "--resume --seeds" in said
    assert "passes as it is" not in said and "trains as O0 does with" not in said
    assert (
        ("may train as O0 does with 1 module" in said) == bool(answer.line) == (cures == ["head"])
    )
    answer, _ = tuned(cures, noise=0.0001)
    said = " ".join(summary(answer))
    assert "Not known" not in said and "would have been seen" in said
    assert answer.outcome == ("passes" if cures == ["O3"] else "cured")


def test_a_tuning_that_goes_on_judges_by_the_margin_of_before(tuned):
    assert tuned(["O3"], noise=0.01, margin="50%")[0].outcome == "passes"
    assert tuned(["O3"], noise=0.01, resume=True)[0].outcome == "passes"
    assert tuned(["O3"], noise=0.01, resume=True, margin="1%")[0].outcome == "undecided"


def test_a_seed_that_does_not_reach_the_script_is_seen_before_the_probe(tuned, monkeypatch):
    monkeypatch.setitem(globals(), "SPREAD", 0.0)
    said = []
    with pytest.raises(TuneError, match="the same with each seed.*--override-seeds"):
        tuned(["head"], say=said.append)
    assert not said


def test_used_up_candidates_are_no_verdict(tuned):
    answer, _ = tuned(["stem"], candidates=2)
    assert answer.outcome == "undecided" and answer.candidates == 2
    [said] = summary(answer)
    assert (
        "Not known yet: 2 candidates were tried" in said
        and "--resume --candidates 4 continues" in said
    )


@pytest.mark.parametrize(
    "level, tried", (("O3", ["loss_scale", "eps", "master_weights"]), ("O2", []))
)
def test_where_nothing_helps_only_what_was_tried_is_named(tuned, level, tried):
    answer, _ = tuned([], level=level)
    assert answer.outcome == "no cure" and list(answer.settings_tried) == tried
    [said] = summary(answer)
    assert "not even with every module that calls torch's functions in FP32" in said
    assert "As it is: diverged at step 1: loss nan." in said
    assert [name for name in ("loss_scale", "eps", "master_weights") if name in said] == tried


def test_a_probe_of_other_options_is_made_anew(tuned):
    for options, count in (({}, 1), ({}, 0), ({"probe_steps": 7}, 1)):
        _, trials = tuned(["head"], **options)
        assert len(trials.probed) == count, options
    assert trials.probed[0].steps == 7


def test_a_script_without_a_loss_is_said_before_the_search(tuned, monkeypatch):
    monkeypatch.setattr(Trials, "run_of", lambda trials, case, seed: trained(Trial(case, seed)))
    with pytest.raises(TuneError, match="no loss and no metric was recorded at O0.*--metric"):
        tuned(["head"])


def test_a_tuning_that_goes_on_keeps_its_own_options_and_says_so(tuned, tmp_path):
    """Also one that was interrupted before it had an answer."""
    own = {"dtype": "bfloat16", "probe_steps": 7, "candidates": 1, "rounds": 5}
    tuned(["head"], **own)
    for file in ("tune.json", "probe/done"):
        (tmp_path / "out" / file).unlink()
    said = []
    answer, trials = tuned(["head"], resume=True, candidates=20, say=said.append)
    words = "--dtype bfloat16 --probe-steps 7 --rounds 5 --seeds 6"
    assert said[0] == f"Resumes the tuning in its folder, and keeps its settings: {words}."
    assert answer.needed == ["head"] and answer.dtype == "bfloat16" and answer.candidates > 1
    assert [(options.steps, options.dtype) for options in trials.probed] == [(7, "bfloat16")]
    assert trials.last.rounds == 5  # the timing is its last sweep


def test_a_tuning_of_another_level_is_not_replaced_by_going_on(tuned, tmp_path):
    before, _ = tuned(["head"])
    for other, said in (
        ({"level": "O2"}, "O2 in float16"),
        ({"dtype": "bfloat16"}, "O3 in bfloat16"),
    ):
        with pytest.raises(
            ValueError, match=f"tuning of O3 in float16. For a tuning of {said}.*--overwrite.*--out"
        ):
            tuned(["stem"], resume=True, **other)
    assert read_answer(tmp_path / "out") == before
    assert tuned(["head"], resume=True, probe_steps=7)[0].needed == ["head"]


def test_a_script_that_changes_meanwhile_is_said(tuned, monkeypatch):
    """A sweep that goes on refuses it; its error names what is not the same."""

    def changed(trials, *arguments, resume=False, **options):
        if resume:
            raise ValueError("cannot be resumed, it is another sweep: script_sha256")
        return begin(trials, *arguments, **options)

    begin = Trials.__call__
    monkeypatch.setattr(Trials, "__call__", changed)
    with pytest.raises(TuneError, match="while it was tuned: cannot be resumed.*script_sha256"):
        tuned(["head"])


@pytest.mark.parametrize(
    "ends, said",
    (
        ({"exit_code": 1}, "exit status 1"),
        ({"ended_by": "timed out: after 9 s"}, "timed out: after 9 s"),
    ),
)
def test_a_probe_that_did_not_end_well_ranks_nothing_and_is_run_again(tuned, ends, said):
    """Modules that it did not come to would never be tried."""
    with pytest.raises(TuneError, match=f"probe's run at O0 {said}.*--resume.*--probe-steps"):
        tuned(["head"], probe_ends=ends)
    answer, trials = tuned(["head"], resume=True)
    assert answer.needed == ["head"] and len(trials.probed) == 1


def test_overwriting_deletes_what_was_found_before(tuned, tmp_path):
    tuned(["head"])
    mine = tmp_path / "out/probe/mine.txt"
    mine.write_text("mine")
    _, trials = tuned(["stem"], overwrite=True)
    assert len(trials.probed) == 1 and mine.exists()


# What the terminal says of an answer and of its modules

SAMPLE = CallErrors(1e-3, 1e-2, 0.0, 0.0)


@pytest.fixture
def answer():
    modules = [Sensitivity(path, "Linear", (SAMPLE,)) for path in ("head", "stem")]
    refused = Sensitivity("layers.0.attention", "Cell", (), "it does not run in half: no", True)
    once = Sensitivity("layers.1.attention", "Cell", (), "it does not run a second time: no")
    fields = {"needed": ["head"], "line": "initialize(...)", "modules": [refused, once, *modules]}
    return Answer("train.py", "O3", "float16", "cured", **fields)


def test_the_speed_of_a_cure_is_the_verdict_on_it(answer):
    answer.paces = {"cure": "speed not told apart from O0's on this machine"}
    assert summary(answer)[-1] == f"Speed, with the cure: {answer.paces['cure']}."


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, ""),
        (1e-5, "0.001 %"),
        (0.123, "12 %"),
        (0.994, "99 %"),
        (0.999, "over 99 %"),
        (1, "100 %"),
    ],
)
def test_shares_are_percents_that_can_be_read(share, text):
    head = Sensitivity("head", "Linear", (CallErrors(1e-3, 1e-2, share, share),))
    row = next(table_rows(Answer("t.py", "O2", "float16", "passes", modules=[head])))
    assert row[4:6] == (text, text)


def test_a_module_that_half_refuses_is_not_called_unmeasured(answer):
    assert troubles(answer) == [
        "layers.0.attention: it does not run in half: no",
        "Not measured: layers.1.attention: it does not run a second time: no",
    ]
    assert next(table_rows(answer))[0] == "layers.0.attention"


def test_where_the_modules_are_that_the_table_leaves_out_is_said(answer):
    answer.modules += [Sensitivity(f"body.{n}", "Linear", (SAMPLE,)) for n in range(30)]
    written = io.StringIO()
    write_terminal(answer, written)
    assert "14 more modules are in tune.json." in written.getvalue()
    assert "body.15" in written.getvalue() and "body.16" not in written.getvalue()


# The command, on a training whose faults are known

SCRIPT = str(Path(__file__).parents[2] / "examples" / "faults.py")
QUICK = ("--seeds", "4", "--probe-steps", "20", "--rounds", "1", "--jobs", "2", "--margin", "2%")


def tune(folder, fault, *options, level="O2"):
    arguments = ["--fault", fault, "--seed", "{seed}", "--steps", "25"]
    command = ["tune", SCRIPT, "--opt-level", level, "--out", str(folder), *QUICK, *options]
    return main.main([*command, "--", *arguments])


@pytest.mark.usefixtures("warm_trials")
def test_one_softmax_is_found_and_nothing_of_it_is_run_again(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "out"
    assert tune(folder, "softmax") == 0
    out, err = capsys.readouterr()
    answer = read_answer(folder)
    assert "computes 4 of its calls" in err and "8 modules and settings to try" in err
    assert answer.outcome == "cured" and answer.is_smallest
    assert answer.needed == ["weigh"] and answer.settings == {}
    assert 'overrides={"weigh": "float"}' in out and answer.line in out
    assert json.loads((folder / "overrides.json").read_text()) == {"weigh": "float"}
    assert {"cure"} == set(answer.speeds)  # the level has failed
    recommendation = "O2 in float16 trains as O0 does with 1 module in FP32: weigh."
    assert (
        recommendation in out and recommendation in (folder / "report.html").read_text()
    )  # one answer
    assert read_results(folder).recommendation.startswith(recommendation)
    assert [line.split()[:3] for line in out.splitlines() if line.split()[-1:] == ["needed"]] == [
        ["weigh", "Weigh", "inf"]
    ]

    monkeypatch.setattr("ampatch.sweep.execution.runner.Runner.run", None)  # no trial is started
    assert tune(folder, "softmax", "--resume") == 0
    assert read_answer(folder) == answer
