"""Where trials run and in which order: the schedule, slots, options.  No process is started."""

import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
from sweep_made import made_run
from sweep_runs import Said, planned

from ampatch.diagnose.speed import HalfSpeeds
from ampatch.sweep import Case, Run, Sweep, SweepError, Trial
from ampatch.sweep.execution import coordinator, engines
from ampatch.sweep.execution import plan as planning
from ampatch.sweep.execution.engines.protocol import Ended, Lost, Progressed, Started
from ampatch.sweep.execution.engines.schedule import Schedule
from ampatch.sweep.execution.placement import Placement, device_groups
from ampatch.sweep.execution.runner import TrialProgress
from ampatch.sweep.options import SweepOptions
from ampatch.sweep.report.rows import summarize

O0, O1 = Case("O0"), Case("O1", "float16")


class Engine:
    """Notes what is submitted; `script` says by label what happens to a trial, and when."""

    def __init__(self, script=None, room=9):
        self.submitted, self.script, self.room = [], script or {}, room
        self.running = []

    def has_room(self):
        return len(self.running) < self.room

    def submit(self, runner, trial, alone):
        self.submitted.append((trial.label, alone, len(self.running)))
        self.running.append(trial)

    def events(self, seconds):
        trial = self.running[0]
        steps = self.script.get(trial.label, ["end"])
        if steps and steps[0] == "step":
            steps.pop(0)
            return [Started(trial), Progressed(trial, TrialProgress(1, 0.5))]
        self.running.pop(0)
        if steps == ["lost"]:
            return [Lost(trial, "gone")]
        return [Ended(Run(trial, 0, 1.0, made_run(trial.case).measured))]


def run_all(engine, others, timed=(), has_trained=False, due=lambda trial: True):
    schedule = Schedule(others, timed, lambda trial: "runner" if due(trial) else None, has_trained)
    return list(schedule.run(engine))


WHOLE = [Trial(case, seed) for seed in (0, 1) for case in (O0, O1)]
SHORT = [Trial(case, repeat=1, short=True) for case in (O0, O1)]


@pytest.mark.parametrize(("happens", "beside"), [(["end"], 0), (["step", "end"], 1)])
def test_nothing_starts_beside_the_first_run_before_it_has_taken_a_step(happens, beside):
    engine = Engine({"O0 seed 0": happens})
    run_all(engine, WHOLE)
    assert [running for _, _, running in engine.submitted[:2]] == [0, beside]


def test_short_runs_are_alone_and_no_more_run_at_a_time_than_there_is_room_for():
    engine = Engine(room=2)
    run_all(engine, WHOLE, SHORT, has_trained=True)
    assert [running for _, _, running in engine.submitted] == [0, 1, 1, 1, 0, 0]
    assert [alone for _, alone, _ in engine.submitted] == [False] * 4 + [True] * 2


def test_what_is_not_due_is_left_out_and_what_is_lost_does_not_end_the_rest():
    engine = Engine({"O0 seed 1": ["lost"]})
    events = run_all(engine, WHOLE, SHORT, due=lambda trial: trial.case == O0)
    labels = ["O0 seed 0", "O0 seed 1", "O0 seed 0 repeat 1 (timing)"]
    assert [label for label, _, _ in engine.submitted] == labels
    assert [type(event) for event in events] == [Ended, Lost, Ended]


class Runner:
    """Stands for a runner: notes who runs beside whom."""

    def __init__(self, beside=2):
        self.together = threading.Barrier(beside)
        self.running, self.seen = 0, []
        self.lock = threading.Lock()

    def run(self, trial, watch, placement):
        with self.lock:
            self.running += 1
        if not placement.alone:
            self.together.wait(timeout=30)
        self.seen.append((trial.label, self.running, placement))
        if not placement.alone:
            self.together.wait(timeout=30)
        with self.lock:
            self.running -= 1
        return Run(trial, 0, 1.0, None, alone=placement.alone)


def test_two_jobs_run_together_and_timed_runs_alone_on_the_first_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    engine = engines.make(SweepOptions(devices=("cuda:0", "cuda:1")))
    runner = Runner()
    with engine:
        list(Schedule(WHOLE, SHORT, lambda trial: runner, has_trained=True).run(engine))
    whole, short = runner.seen[:4], runner.seen[4:]
    assert [running for _, running, _ in whole] == [2, 2, 2, 2]
    assert {placement.devices for _, _, placement in whole} == {("cuda:0",), ("cuda:1",)}
    alone = [(running, placement.devices) for _, running, placement in short]
    assert alone == [(1, ("cuda:0",))] * 2


@pytest.mark.parametrize(
    ("devices", "visible", "expected"),
    [
        (("cuda:1",), None, {"CUDA_VISIBLE_DEVICES": "1"}),
        (("cuda:0", "cuda:1"), "5,GPU-77", {"CUDA_VISIBLE_DEVICES": "5,GPU-77"}),
        (("cuda:1",), "5,GPU-77", {"CUDA_VISIBLE_DEVICES": "GPU-77"}),
        (("xpu:0",), None, {"ZE_AFFINITY_MASK": "0"}),
        ((), "3", {"CUDA_VISIBLE_DEVICES": "3"}),
    ],
)
def test_a_trial_sees_its_devices_only(devices, visible, expected):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert Placement(devices=devices).apply(environment) == expected
    placement = Placement(devices=devices, variables=(("A", None), ("B", "2")))
    assert placement.apply({**environment, "A": "1", "C": "3"}) == {**expected, "B": "2", "C": "3"}


def test_trials_of_several_processes_get_as_many_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    devices = ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert device_groups(devices, 2) == [devices[:2], devices[2:]]


# What cannot be run is said before anything runs


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": "rya"}, 'one of local, ray. Did you mean "ray"?'),
        ({"devices": "cuda:0,cuda:7"}, "there is no cuda:7 on this machine, which has 2 of cuda"),
        ({"devices": "cuda:0,cuda:0"}, "expected different devices of one kind"),
        ({"devices": "cuda:0,xpu:0"}, "expected different devices of one kind"),
        ({"devices": "cuda"}, "--devices cuda: expected different devices of one kind"),
        ({"devices": "cuda:0,cuda:1", "nproc_per_node": 3}, "Expected a multiple of 3"),
        ({"devices": "cuda:0", "jobs": 2}, "--jobs and --devices: give one of them"),
        ({"address": "auto"}, "--address: has no meaning with --engine local, only with ray"),
        ({"jobs": 0}, "--jobs 0: expected at least 1"),
    ],
)
def test_wrong_options(options, said, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(planning, "measure_half_dtypes", None)  # it would take seconds
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(ValueError) as refused:
        Sweep(script, out=tmp_path / "out", **options)
    assert said in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_an_engine_without_its_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else 1)
    with pytest.raises(ValueError, match=r"needs the package ray.*ampatch\[ray\]"):
        SweepOptions(engine="ray")


def test_only_runs_that_ran_alone_count_for_speed():
    runs = [made_run(case, seed) for case in (O0, O1) for seed in (0, 1)]
    for run in runs[1::2]:
        run.alone = False
        run.measured.step_seconds = [None, *[9.0] * 119]
    base, row = summarize(runs)
    assert (base.step_ms, row.step_ms, row.speed, row.speeds.n) == (10.0, 5.0, 2.0, 1)
    assert row.comparisons[0].n == 2  # for accuracy both count


class Cluster(Engine):
    __enter__ = lambda self: self  # noqa: E731
    __exit__ = lambda self, *exception: None  # noqa: E731


def test_a_first_run_that_takes_longer_than_the_budget_is_told_once(tmp_path, monkeypatch):
    engine = Cluster({"O0 seed 0": ["step", "step", "end"], "O1-bfloat16 seed 0": ["step", "end"]})
    monkeypatch.setattr(engines, "make", lambda *_: engine)
    half = HalfSpeeds((), {"bfloat16": 1}, {"bfloat16": 1})
    monkeypatch.setattr(planning, "measure_half_dtypes", lambda: half)
    clock = itertools.count(0, 700)  # seconds between two looks
    monkeypatch.setattr(coordinator, "time", SimpleNamespace(monotonic=clock.__next__))
    options = {"levels": ["O0", "O1"], "autocast": False, "rounds": None, "budget": 10}
    said = Said()
    planned(tmp_path, "", **options).run(said)
    told = [event for event in said.events if "O0 alone takes longer than the budget" in event]
    assert len(told) == 1


def test_lost_trials_are_named_when_the_others_have_run(tmp_path, monkeypatch):
    engine = Cluster({"O0 seed 0": ["step", "lost"]})
    monkeypatch.setattr(engines, "make", lambda *_: engine)
    sweep = planned(tmp_path, "", levels=["O0"], seeds=2, jobs=2)
    with pytest.raises(
        SweepError, match=r"lost because their workers died: O0 seed 0 \(gone\). --resume"
    ):
        sweep.run()
    assert [run.trial.seed for run in sweep.runs] == [1]
