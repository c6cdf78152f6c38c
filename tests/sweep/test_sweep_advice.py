"""What reports advise, pasted behind the script's name: it does what it says, and nothing else."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
from sweep_made import stand_in, trained

from ampatch.cli import main
from ampatch.diagnose.speed import HalfSpeeds
from ampatch.sweep import read_results
from ampatch.sweep.execution import plan as planning
from ampatch.sweep.execution.directory import RunFiles
from ampatch.sweep.json_files import to_json
from ampatch.sweep.kinds import AMPATCH, NO_AMP, Kind
from ampatch.sweep.measure.output_metrics import metric_hint, read_metrics
from ampatch.sweep.measure.run_record import Series
from ampatch.sweep.trial import BASE

SCATTER = (0.0, 0.013, -0.009, 0.004, -0.004)


class Machine:
    """Stands for the processes: half is 1.5 times as fast, and scatters from seed to seed."""

    def __init__(self):
        self.kind, self.metric, self.noise, self.ran = AMPATCH, "accuracy", 1.0, []
        self.slower = 0.0  # seconds by which each run takes longer than the one before
        self.clock = 0.0  # at which runs begin

    def run(self, runner, trial, place):
        self.ran.append((trial, runner.script_arguments(trial)))
        is_base, seed = trial.case == BASE, trial.seed
        ms = (self.noise if trial.again else 1.0) * (150.0 if is_base else 100.0)
        steps = min(filter(None, (runner.steps, 40)))
        run = trained(trial, [1.0] * steps, steps=steps, ms=ms, kind=Kind(self.kind))
        value = 0.9 + (0 if is_base else SCATTER[seed % 5])
        if not trial.short and self.metric:
            run.measured.metrics = {self.metric: Series([steps], [value + 0.01 * seed])}
        run.measured.machine["began"] = self.clock
        log = RunFiles.of(runner.directory, trial).log
        log.write_text(f"acc {value}\n")
        run.measured.metrics |= read_metrics(log, runner.metrics or {})
        seconds = 4.0 + steps * ms / 1000 + self.slower * len(self.ran)
        return dataclasses.replace(run, seconds=seconds, alone=place.alone)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    machine = Machine()
    stand_in(monkeypatch, machine.run)
    half = HalfSpeeds(("bfloat16",), {"bfloat16": 1.5}, {"bfloat16": 1.5})
    monkeypatch.setattr(planning, "measure_half_dtypes", lambda: half)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return machine


def sweep(*words):
    """The results of `ampatch sweep train.py` with these words."""
    assert main.main(["sweep", "train.py", *words]) == 0
    return read_results("ampatch-sweep/train")


def advice(results):
    said = " ".join([results.recommendation, *results.notes])
    lines = re.findall(r"--resume --\w+ (?:'[^']*'|[^\s,;:.]+)", said)
    return [shlex.split(line) for line in lines]


SHORT = ("--levels", "O0,O1", "--no-autocast")  # each run is summed up with those before
KINDS = {
    "auto": (NO_AMP, ["--rounds", "1"]),
    "with rows": (AMPATCH, [*SHORT, "--rounds", "1", "--with", "O2 loss_scale=128"]),
    "with a budget": (AMPATCH, [*SHORT, "--budget", "0.4"]),
    "with levels": (AMPATCH, ["--levels", "O0,O2", "--dtypes", "float16", "--seeds", "1"]),
    "side by side": (AMPATCH, [*SHORT, "--jobs", "2", "--rounds", "1", "--margin", "2%"]),
}


@pytest.mark.parametrize(("kind", "words"), KINDS.values(), ids=KINDS)
def test_each_advice_does_what_it_says(kind, words, machine, capsys):
    machine.kind = kind
    results = sweep(*words, "--", "--lr", "1")
    followed, rows = [], results.settings["rows"]
    while todo := [advised for advised in advice(results) if advised not in followed]:
        machine.ran.clear()
        before, seeds = results, {row.label: row.seeds for row in results.rows}
        capsys.readouterr()
        results = sweep(*todo[0])
        followed.append(todo[0])
        _, flag, value = todo[0]
        assert results.settings["rows"] == rows and results.arguments == ["--lr", "1"]
        assert all(arguments == ["--lr", "1"] for _, arguments in machine.ran) and machine.ran
        kept = capsys.readouterr().err.partition("keeps its settings: ")[2].partition("\n")[0]
        own = [word for word in words if word.startswith("--") and word not in (flag, "--rounds")]
        assert all(word in kept for word in own if word != "--budget" or flag == "--budget")
        if flag == "--rounds":
            assert min(row.speeds.n for row in results.rows if row.speeds) >= int(value)
            assert {row.label: row.seeds for row in results.rows} == seeds
        elif flag == "--seeds":
            assert {row.seeds for row in results.rows} == {int(value)}
        else:
            assert flag == "--budget" and results.settings["seeds"] == 5
            has_all = any(f"--budget {value} runs all" in note for note in before.notes)
            assert min(row.seeds for row in results.rows) >= (5 if has_all else 3)
        assert before.options.keys() - {"budget"} <= results.options.keys()
    assert followed, results.recommendation


def test_rounds_that_are_advised_on_a_noisy_machine_are_added_to_a_sweep_with_a_budget(machine):
    """Also where the line of before is repeated: its budget is then not asked for anew."""
    machine.noise = 1.6
    options = ("--budget", "3", "--levels", "O0,O1", "--margin", "5%")  # accuracy is shown
    results = sweep(*options)
    [words] = [advised for advised in advice(results) if advised[1] == "--rounds"]
    assert int(words[2]) == results.rows[0].speeds.n + 3
    more = sweep(*options, *words)
    assert {row.speeds.n for row in more.rows} == {int(words[2])}
    assert [row.seeds for row in more.rows] == [row.seeds for row in results.rows]


def test_a_row_that_was_added_late_says_what_times_it(machine):
    first = sweep("--levels", "O0,O1", "--seeds", "3", "--no-autocast")
    assert not any("long after" in note for note in first.notes)
    machine.clock = 1e6
    results = sweep("--resume", "--levels", "O3")
    assert not results.rows[-1].speeds and results.rows[1].speeds
    [note] = [note for note in results.notes if "O3 bfloat16 ran long after O0" in note]
    words = re.search(r"--resume --rounds \d+", note)[0].split()
    assert all(row.speeds for row in sweep(*words).rows)


def test_terminal_page_and_summary_name_the_same_budget(machine, capsys):
    """Also where the last run has changed what all of it would take."""
    machine.slower = 0.7
    results = sweep("--budget", "2")
    [note] = [told for told in results.notes if "--resume --budget" in told]
    said = capsys.readouterr()
    lines = [line for line in (said.err + said.out).splitlines() if line.startswith("Note: ")]
    assert [line for line in lines if "--resume --budget" in line][-1].endswith(note)
    assert said.err.count("Planned for --budget") == 1  # and not again with each run
    assert note in Path("ampatch-sweep/train/report.html").read_text()


def test_a_direction_that_is_advised_runs_nothing_again(machine):
    machine.metric = "foo"
    results = sweep("--levels", "O0,O1", "--seeds", "3")
    [words] = advice(results)
    assert words == ["--resume", "--better", "foo=lower"]
    machine.ran.clear()
    assert "does not say" not in sweep(*words).recommendation and not machine.ran


def test_a_metric_is_read_from_the_output_of_runs_that_have_ended(machine):
    sweep("--levels", "O0,O1", "--seeds", "2")
    machine.ran.clear()
    results = sweep("--resume", "--metric", r"acc=acc (\S+)", "--judge", "acc")
    assert not machine.ran and results.rows[1].metrics["acc"] == pytest.approx(0.9065)
    with pytest.raises(SystemExit, match="2"):
        sweep("--resume", "--metric", r"loss=loss (\S+)")
    assert "metrics" in results.options and read_results("ampatch-sweep/train") == results


def test_a_number_in_the_output_that_looks_like_a_metric_is_pointed_to(machine, capsys):
    machine.metric = None
    results = sweep("--levels", "O0,O1", "--seeds", "2")
    assert capsys.readouterr().err.count('The output has "acc 0.9"') == 1
    [words] = [advised for advised in advice(results) if advised[1] == "--metric"]
    machine.ran.clear()
    results = sweep(*words)
    assert results.rows[1].comparisons[0].name == "acc" and not machine.ran
    assert not [advised for advised in advice(results) if advised[1] == "--metric"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("epoch 3 loss 0.5 val_acc: 0.93, 4 s", r"val_acc=val_acc: ([\d.]+)"),
        ("Accuracy = 93.1%", r"Accuracy=Accuracy = ([\d.]+)"),
        ("val_logloss: 0.9242", r"val_logloss=val_logloss: ([\d.]+)"),
        ("Epoch 2 Loss 0.5 Test Loss: 0.93", r"Test_Loss=Test Loss: ([\d.]+)"),
        ("valid/ppl = 17.5, 4 s", r"valid/ppl=valid/ppl = ([\d.]+)"),
        ("eval_foo 0.93", r"eval_foo=eval_foo ([\d.]+)"),
        ("test_loss 1.5 accuracy 0.93", r"accuracy=accuracy ([\d.]+)"),  # the better one
        ("{'loss': 0.5, 'eval_accuracy': 0.93}", r"eval_accuracy=eval_accuracy.: ([\d.]+)"),
        ('{"epoch": 2, "val": {"acc": 0.93}}', r"acc=acc.: ([\d.]+)"),
        ("| val acc | 0.93 |", r"val_acc=val acc \| ([\d.]+)"),
        (
            "Accuracy of the net on 10000 images: 93 %",
            r"Accuracy=Accuracy of the net on 10000 images: ([\d.]+)",
        ),
        ("best accuracy at epoch: 3", None),
        ("lr 0.1 loss 0.5 acc_std 0.2 epoch 7", None),
        ("val time: 3.25 test_batch 12.5 Test images: 360 latest 0.93 validate 3", None),
        ("", None),
    ],
)
def test_what_looks_like_a_metric(text, expected, tmp_path):
    log = tmp_path / "run.log"
    log.write_text(text + "\n")
    told = metric_hint(log, len(text))
    assert (told and told[1]) == expected
    if expected:
        name, _, pattern = expected.partition("=")
        assert 0.9 < read_metrics(log, {name: pattern})[name].values[0] < 94


def test_levels_and_rows_that_are_named_later_are_added(machine):
    sweep("--levels", "O0,O1", "--seeds", "1", "--no-autocast")
    results = sweep("--resume", "--levels", "O2", "--with", "O1 loss_scale=8", "--dtypes=float16")
    assert [row.label for row in results.rows] == [
        "O0", "O1-bfloat16", "O1-float16", "O2-bfloat16", "O2-float16",
        "O1-bfloat16-loss_scale=8", "O1-float16-loss_scale=8",
    ]  # fmt: skip
    assert {row.seeds for row in results.rows} == {1}


def test_the_summary_is_all_of_the_output_with_json(machine, capsys):
    words = ["--levels", "O0,O1", "--seeds", "2", "--metric", r"acc=acc (\S+)"]
    results = sweep("--json", *words)
    said = capsys.readouterr()
    assert json.loads(said.out) == to_json(results.to_json())
    assert "[1/" in said.err and "Recommendation: " in said.err and "Written to " in said.err
    sweep("--quiet", "--json", "--resume")
    said = capsys.readouterr()
    assert json.loads(said.out)["complete"] and "[1/" not in said.err
    with pytest.raises(SystemExit, match="2"):
        sweep("--json", *words, "--seeds", "0")
    assert capsys.readouterr().out == ""


def test_a_quiet_sweep_shows_its_results_alone_and_all_of_them(machine, capsys):
    machine.kind = NO_AMP
    sweep("--quiet", "--seeds", "2")
    said = capsys.readouterr()
    assert "seed 0" not in said.err and "Note" not in said.err
    assert "Recommendation: " in said.out and "Note: train.py has no mixed" in said.out
