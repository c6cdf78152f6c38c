"""A sweep's runs in experiment trackers, and the refusal where the library of one is missing."""

import importlib
import json
import os
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest
from sweep_made import CASES, made_run, made_sweep

from ampatch.cli.main import main
from ampatch.sweep.measure.run_record import Run, Series
from ampatch.sweep.report import trackers
from ampatch.sweep.trial import Trial


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
