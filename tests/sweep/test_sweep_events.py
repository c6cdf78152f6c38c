"""TensorBoard's event files of a sweep, and the refusal where tensorboard is missing."""

import importlib
import sys

import pytest
from sweep_made import CASES, made_run, made_sweep

from ampatch.cli.main import main
from ampatch.sweep import Sweep
from ampatch.sweep.report.tensorboard_events import write_events


@pytest.fixture
def no_tensorboard(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)


def test_without_tensorboard_a_sweep_does_not_begin(no_tensorboard, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Sweep, "run", lambda *rest: pytest.fail("began"))
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text("")
    with pytest.raises(SystemExit, match="2"):
        main(["sweep", str(script), "--out", str(out), "--tensorboard"])
    error = capsys.readouterr().err
    assert "--tensorboard: " in error and "pip install tensorboard" in error
    assert not out.exists()


def test_without_tensorboard_a_report_is_not_begun(no_tensorboard, tmp_path, capsys):
    made_sweep(tmp_path, [made_run(CASES[0])])
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(tmp_path), "--tensorboard"])
    assert "pip install tensorboard" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_events_read_back_are_the_runs_series(tmp_path):
    """Read by TensorBoard's own reader, where that is installed."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    run = made_run(CASES[1], diverges=True)
    made_sweep(tmp_path, [run])
    write_events(tmp_path)
    write_events(tmp_path)  # takes the place of the first
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
    assert [event.value for event in events.Scalars("step ms")] == pytest.approx([5.0] * 119)
