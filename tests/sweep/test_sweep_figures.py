"""The figures and the table of records made by hand, lines meanwhile, and experiment trackers."""

import importlib
import io
import itertools
import json
import math
import os
import re
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from sweep_made import CASES, made_run, made_sweep

from ampatch.cli.main import main
from ampatch.sweep.execution.progress import Lines
from ampatch.sweep.json_files import read_json, write_json
from ampatch.sweep.measure import step_times
from ampatch.sweep.measure.readings import BATCH, Readings
from ampatch.sweep.measure.recorder import Recorder
from ampatch.sweep.measure.run_record import Measured, Run, Series
from ampatch.sweep.report import trackers
from ampatch.sweep.report.numbers import plus_minus, ratio
from ampatch.sweep.report.rows import summarize
from ampatch.sweep.report.run_figures import first_and_last, status, step_ms
from ampatch.sweep.report.terminal import write_table
from ampatch.sweep.trial import Case, Trial


def run_of(level="O1", exit_code=0, **fields):
    case = Case(level, None if level == "O0" else "float16")
    return Run(Trial(case), exit_code, 1.0, Measured(opt_level=level, **fields))


def losses(*values):
    return {"0": Series(list(range(len(values))), list(values))}


def test_an_overflow_that_was_skipped_is_no_divergence():
    inf = math.inf
    assert status(run_of(skipped=[False, True, False], losses=losses(1.0, inf, 0.5))) == "ok"
    not_skipped = run_of(skipped=[False, False, False], losses=losses(1.0, inf, 0.5))
    assert status(not_skipped) == "diverged at step 2: loss inf"
    to_the_end = run_of(skipped=[False, True], losses=losses(1.0, math.nan))
    assert status(to_the_end) == "diverged at step 2: loss nan"


def test_a_script_that_overrules_the_sweep_is_found_out():
    run = run_of(skipped=[False], losses=losses(1.0))
    run.trial = Trial(Case("O2", "float16"))
    assert status(run) == "other level: ran at O1, not at O2"


def test_first_and_last_loss_are_means_of_a_twentieth():
    values = [float(i) for i in range(100)]
    assert first_and_last(Measured(losses=losses(*values))) == (2.0, 97.0)
    assert first_and_last(Measured(losses=losses(3.0))) == (3.0, 3.0)
    several = {loss_id: Series([0], [float(loss_id)]) for loss_id in ("10", "9", "11")}
    assert first_and_last(Measured(losses=several)) == (9.0, 9.0)  # the lowest loss_id's


def test_warm_up_and_pauses_do_not_count():
    slow_start = [None, *[9.0] * 10, *[1.0, 2.0, None, 3.0] * 10]
    assert step_ms(Measured(step_seconds=slow_start)) == 2000.0
    assert step_ms(Measured(step_seconds=[None])) is None


def test_json_keeps_every_value(tmp_path):
    measured = Measured(
        opt_level="O1",
        properties={"dtype": "torch.float16"},
        skipped=[True, False],
        step_seconds=[None, 0.25],
        losses=losses(math.inf, -math.inf, 0.1),
        metrics={"accuracy": Series([2], [0.75])},
        loss_scale=32768.0,
        device="cpu",
        memory_bytes=123,
        memory_kind="device",
        error="ValueError: no",
        loss_scales={"0": Series([0, 3], [65536.0, math.inf], [0.5, 1.5])},
        stopped_at=2,
        cpu_seconds=[None, 0.5],
        machine={"load_at_start": 1.5, "threads": 2},
    )
    case = Case("O2", "float16", tf32=True, settings=(("overrides", "x"), ("loss_scale", 2.0)))
    trial = Trial(case, seed=3, repeat=1, short=True)
    run = Run(trial, 1, 2.5, measured, ended_by="timed out: after 2 s", timeout=2.0)
    write_json(tmp_path / "run.json", run.to_json())
    written = read_json(tmp_path / "run.json")
    assert (written["format"], written["planned"]["seed"]) == (4, 3)
    assert Run.from_json(read_json(tmp_path / "run.json")) == run


def test_the_plain_table_is_aligned_and_has_the_metrics():
    figures = {"skipped": [False] * 2, "losses": losses(1.0, 0.5), "loss_scale": 65536.0}
    ok = run_of("O0", metrics={"test_accuracy": Series([2], [0.975])}, **figures)
    crashed = run_of("O3", exit_code=1, error="RuntimeError: no")
    rows = summarize([ok, crashed])
    write_table(rows, text := io.StringIO())
    head, first, second = text.getvalue().splitlines()[:3]
    assert "test accuracy" in head
    end = head.index("test accuracy") + len("test accuracy")
    assert first[:end].endswith(" 0.9750") and second[:end].endswith("  -")
    assert first.split()[-2:] == ["65536", "ok"]
    assert head.endswith(" status") and second.endswith(" crashed")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("width", "parts"), [(60, 3), (80, 2), (100, 2), (160, 1)])
def test_a_terminal_of_any_width_gets_all_of_the_table_in_parts(width, parts, monkeypatch):
    """Each part names its rows; a part that would say "ok" only is left out."""
    monkeypatch.setenv("COLUMNS", str(width))
    fields = {
        "skipped": [False] * 300,
        "losses": losses(1.0, 0.5),
        "loss_scale": 65536.0,
        "metrics": {"test_accuracy": Series([2], [0.975])},
        "memory_bytes": 400 * 2**20,
        "step_seconds": [None, 0.01234],
    }
    ok, lost = run_of("O0", **fields), run_of("O3", **{**fields, "losses": losses(math.nan)})
    write_table(summarize([ok, lost]), terminal := Terminal())
    text = terminal.getvalue()
    words = ("float16", "0/300", "65536", "0.9750", "400", "12.34", "diverged at step 1", "nan")
    assert all(word in text for word in words)
    assert max(map(len, text.splitlines())) < width
    assert len(re.findall(r"(?m)^O3 +float16", text)) == parts
    monkeypatch.setenv("COLUMNS", "90")
    write_table(summarize([ok]), terminal := Terminal())
    assert terminal.getvalue().count("float32") == 1 and "status" not in terminal.getvalue()


@pytest.mark.parametrize(
    ("mean", "sd", "text"),
    [
        (0.97593, 0.01163, "0.976 ± 0.012"),
        (123.4, 12.0, "123 ± 12"),
        (1.0, 1e-9, "1 ± 1.0e-09"),
        (0.5, 0.0, "0.5000"),
        (0.0, None, "0.0000"),
        (2e-5, None, "2.00e-05"),
        (math.nan, 0.1, "nan"),
        (1e30, 2e29, "1.000e+30 ± 2.0e+29"),
        (-2e30, None, "-2.000e+30"),
        (None, None, "-"),
    ],
)
def test_scatter_decides_the_decimals(mean, sd, text):
    assert plus_minus(mean, sd) == text


def test_a_speed_far_from_1_shows_its_digits():
    speeds = (1.256, 0.104, 0.0152, 1.5e-4, 34.56, 591.6)
    assert [ratio(speed) for speed in speeds] == ["1.26", "0.10", "0.015", "1.5e-04", "34.6", "592"]


def test_steps_are_timed_by_the_devices_events_which_are_read_long_after(monkeypatch):
    events, behind = [], []

    def moment(device):
        events.append((events[-1] if events else 0.0) + (0.002 if len(events) % 2 else 0.004))
        return events[-1]

    def seconds_between(moments):
        behind.append(len(events) - 1 - events.index(moments[-1]))
        return [later - earlier for earlier, later in itertools.pairwise(moments)]

    monkeypatch.setattr(step_times, "record_time", moment)
    monkeypatch.setattr(step_times, "seconds_between", seconds_between)
    times = step_times.StepTimes()
    for step in range(6 * BATCH):
        assert times.record_step_end(7, torch.device("cuda", 0), pauses=step // 100) == step + 1
    assert len(behind) > 3 and min(behind) >= BATCH  # so the host waits for no recent work

    figures = times.of_main_optimizer()

    seconds = figures["step_seconds"]
    assert len(seconds) == 6 * BATCH and figures["cpu_seconds"] == []
    paused = [step for step, value in enumerate(seconds) if value is None]
    assert paused == list(range(0, 6 * BATCH, 100))
    assert seconds[1:100] == pytest.approx([0.002, *[0.004, 0.002] * 49])


def test_of_two_optimizers_the_one_that_steps_most_is_timed(monkeypatch):
    """GANs: the discriminator's two steps and the generator's are one iteration of the script."""
    clock = iter(range(99))
    monkeypatch.setattr(step_times, "record_time", lambda device: float(next(clock)))
    times = step_times.StepTimes()
    for optimizer in (2, 1, 1, 2, 1, 1, 2, 1):
        times.record_step_end(optimizer, torch.device("cpu"))
    assert times.of_main_optimizer()["step_seconds"] == [None, 1.0, 2.0, 1.0, 2.0]


def test_an_evaluation_is_no_step():
    """Metrics mean that the script has evaluated; the next step contains it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)
    recorder = Recorder(lambda steps, loss: None)
    for values in ({}, {"accuracy": 0.5}, {}):
        recorder.on_step(optimizer, False)
        recorder.on_metrics(values)
    recorder.on_step(optimizer, True)
    measured = recorder.measured()
    assert [value is None for value in measured.step_seconds] == [True, False, True, False]
    assert [value is None for value in measured.cpu_seconds] == [True, False, True, False]
    assert measured.metrics["accuracy"].values == [0.5] and measured.skipped[-1] is True


def test_a_script_that_goes_on_after_its_last_step_was_not_stopped_there():
    """It catches every exception, so it trains to its own end."""
    recorder = Recorder(lambda steps, loss: None, steps=2)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)
    recorder.on_step(optimizer, False)
    with pytest.raises(SystemExit):
        recorder.on_step(optimizer, False)
    assert recorder.measured().stopped_at == 2
    recorder.on_step(optimizer, False)
    assert recorder.measured().stopped_at is None


def test_readings_keep_order_and_survive_changes_in_place():
    readings = Readings()
    loss = torch.tensor(1.5, requires_grad=True)
    readings.add(loss * 1)
    readings.add(torch.tensor([1.0, 2.0]))
    flag = torch.zeros((), dtype=torch.bool)
    readings.add(flag)
    flag.fill_(True)
    readings.add(True)
    assert readings.read() == [1.5, 1.5, 0.0, 1.0]
    assert readings.latest == 1.0


# What is shown while a sweep runs


def test_a_pipe_gets_lines_with_the_time_left():
    stream = io.StringIO()
    timing = Trial(Case("O1", "float16"), repeat=1, short=True)
    with Lines(stream) as shown:
        shown.started(1, 0, Trial(Case("O0")))
        shown.reached(Trial(Case("O0")), 3, 0.5)
        shown.ended(made_run(Case("O0")))  # in 2.5 s
        shown.said("a note")
        shown.started(2, 8, Trial(Case("O1", "float16"), seed=1), 3723.4)
        shown.started(4, 8, timing, 5)
    assert stream.getvalue().splitlines() == [
        "[1] O0 seed 0: started",
        "[1] O0 seed 0: ok, 120 steps of 10.00 ms in 2.5 s",
        "Note: a note",
        "[2/8] O1-float16 seed 1: started, about 1:02:03 left",
        "[4/8] O1-float16 seed 0 repeat 1 (timing): started, about 0:00:05 left",
    ]


def test_a_terminal_has_one_line_that_moves_below_those_of_runs_that_have_ended(monkeypatch):
    """Where a name is longer than the line, its end with seed and step is seen."""
    monkeypatch.setenv("COLUMNS", "40")
    stream = io.StringIO()
    stream.isatty = lambda: True
    row = Trial(Case("O2", "bfloat16", settings=(("keep_batchnorm_fp32", False),)), seed=12)
    with Lines(stream) as shown:
        shown.started(1, 2, Trial(Case("O0")), 3600)
        shown.ended(made_run(Case("O0")))
        shown.started(2, 2, row)
        shown.reached(row, 60, 0.25)
        shown.said("a note")
    nothing, *lines = stream.getvalue().split("\r\x1b[K")
    assert nothing == "" and [line for line in lines if line.endswith("\n")] == [
        "[1/2] O0 seed 0: ok, 120 steps of 10.00 ms in 2.5 s\n",
        "Note: a note\n",
    ]
    moving = [line for line in lines if line and not line.endswith("\n")]
    assert [len(line) for line in moving] == [39] * 3
    ends = (" seed 0: started, about 1:00:00 left", " seed 12: started", ": step 60, loss 0.25")
    for line, end in zip(moving, ends, strict=True):
        assert line.endswith(end)


@pytest.mark.parametrize("library", ["tensorboard", "wandb"])
def test_without_its_library_no_sweep_or_report_is_begun(library, tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    made_sweep(tmp_path, [made_run(CASES[0])])
    for command in (["sweep", __file__, "--out", str(tmp_path / "out")], ["report", str(tmp_path)]):
        with pytest.raises(SystemExit, match="2"):
            main([*command, f"--{library}"])
        error = capsys.readouterr().err
        assert f"--{library}: " in error and f'pip install "ampatch[{library}]"' in error
    assert not (tmp_path / "out").exists() and not (tmp_path / "report.html").exists()


def test_events_read_back_are_the_runs_series(tmp_path):
    """Read by TensorBoard's own reader, where that is installed."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    run = made_run(CASES[1], diverges=True)
    made_sweep(tmp_path, [run])
    trackers.write("tensorboard", tmp_path)
    trackers.write("tensorboard", tmp_path)  # takes the place of the first
    place = tmp_path / "tensorboard" / run.trial.file_stem
    assert len(list(place.iterdir())) == 1
    events = reader.EventAccumulator(str(place)).Reload()
    assert set(events.Tags()["scalars"]) == {
        "loss", "loss scale", "metrics/accuracy", "step ms", "skipped"
    }  # fmt: skip
    losses, series = events.Scalars("loss"), run.measured.losses["0"]
    assert [event.step for event in losses] == series.steps
    assert [event.value for event in losses] == pytest.approx(series.values, nan_ok=True)
    assert losses[-1].wall_time - losses[0].wall_time == pytest.approx(
        series.seconds[-1] - series.seconds[0]
    )
    assert [(e.step, e.value) for e in events.Scalars("loss scale")] == [(0, 65536), (4, 32768)]
    assert sum(event.value for event in events.Scalars("skipped")) == 1
    (origin,) = events.Tensors("where the figures come from/text_summary")
    assert b"0123abc-dirty" in origin.tensor_proto.string_val[0]
    assert [event.value for event in events.Scalars("step ms")] == pytest.approx([5.0] * 119)


@pytest.fixture
def sweep_of_two(tmp_path):
    """A run that diverges and a short one, which is left out."""
    run = made_run(CASES[1], diverges=True)
    short = made_run(CASES[1])
    short.trial = Trial(CASES[1], repeat=1, short=True)
    made_sweep(tmp_path, [run, short])
    return tmp_path, run


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("wandb: no such key."), "wandb: no such key."),
        (OSError(28, "No space left", "DIR/wandb"), "DIR/wandb: No space left."),
    ],
)
def test_what_stops_a_tracker_is_said_at_the_end(error, said, sweep_of_two, monkeypatch, capsys):
    def init(**_):
        raise error

    library = SimpleNamespace(
        init=init, Settings=dict, errors=SimpleNamespace(Error=ZeroDivisionError)
    )
    monkeypatch.setitem(sys.modules, "wandb", library)
    assert main(["report", str(sweep_of_two[0]), "--wandb"]) == 1
    assert capsys.readouterr().err.endswith(f"ampatch report: {said}\n")
    assert (sweep_of_two[0] / "report.html").exists()


def test_trackers_get_all_series():
    run = made_run(CASES[3], losses={"0": Series([0], [2.0], [1.5]), "1": Series([0], [3.0])})
    points = list(trackers.points(run))
    assert {point.tag for point in points} == {
        "loss", "loss/1", "loss scale", "metrics/accuracy", "step ms", "skipped"
    }  # fmt: skip
    assert trackers.Point("loss", 0, 2.0, 1.5) in points
    assert trackers.Point("step ms", 1, 5.0, None) in points
    assert list(trackers.points(Run(run.trial, 1, 0.5, None))) == []


def report_to_wandb(directory, **variables):
    """In a process of its own: wandb reads the environment once."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    command = [sys.executable, "-m", "ampatch", "report", str(directory), "--wandb"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_wandb_offline_has_each_run_once(sweep_of_two):
    pytest.importorskip("wandb", reason="wandb is not installed")
    directory, run = sweep_of_two
    for _ in range(2):
        done = report_to_wandb(directory, WANDB_MODE="offline")
        assert done.returncode == 0, done.stderr
    assert "Weights & Biases: project ampatch-sweep, group train & <test>" in done.stdout
    (file,) = directory.glob("wandb/offline-run-*/*.wandb")
    records = list(wandb_records(file.read_bytes()))
    (about,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    assert about.display_name == run.trial.label and about.run_group.startswith("train & <test>")
    config = {item.key: json.loads(item.value_json) for item in about.config.update}
    assert config["dtype"] == "float16" and config["from"]["git"].startswith("0123abc")
    losses = [
        float(json.loads(item.value_json))
        for record in records
        if record.WhichOneof("record_type") == "history"
        for item in record.history.item
        if "loss" in (item.key, *item.nested_key)
    ]
    assert losses == pytest.approx(run.measured.losses["0"].values, nan_ok=True)


def wandb_records(data):
    """What wandb wrote: a header of 7 bytes, and LevelDB's log of messages."""
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    place, parts, block = 7, b"", 32768
    while place + 7 <= len(data):
        if block - place % block < 7:  # too little for another header: the rest is empty
            place += block - place % block
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = records.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


@pytest.mark.slow
def test_a_refusal_of_wandb_leaves_the_report(sweep_of_two):
    pytest.importorskip("wandb", reason="wandb is not installed")
    directory, _ = sweep_of_two
    done = report_to_wandb(directory, WANDB_MODE="online", WANDB_API_KEY="no key")
    assert done.returncode == 1 and "--wandb` tries again" in done.stderr
    assert (directory / "report.html").exists()
