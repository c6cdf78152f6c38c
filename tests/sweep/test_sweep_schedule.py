"""What a sweep plans for its budget, where trials run and in which order: no process is started."""

import dataclasses
import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
from sweep_made import made_run, stand_in, trained
from sweep_runs import Said, planned

from ampatch.diagnose.speed import HalfSpeeds
from ampatch.sweep import Run, Sweep, SweepError
from ampatch.sweep.execution import coordinator, engines
from ampatch.sweep.execution import plan as planning
from ampatch.sweep.execution.budget import MIN_TIMED_STEPS
from ampatch.sweep.execution.engines.protocol import Ended, Lost, Progressed, Started
from ampatch.sweep.execution.engines.schedule import Schedule
from ampatch.sweep.execution.placement import Placement, device_groups
from ampatch.sweep.execution.plan import Plan
from ampatch.sweep.execution.runner import TrialProgress
from ampatch.sweep.kinds import AMPATCH, NO_AMP, Kind
from ampatch.sweep.measure.run_record import Series
from ampatch.sweep.options import SweepOptions
from ampatch.sweep.report.results import Results
from ampatch.sweep.report.rows import summarize
from ampatch.sweep.trial import BASE, Case, Trial

START, STEPS, MS = 4.0, 96, 87.0  # the digits example's: seconds of a process, steps, O0's step
FAST = HalfSpeeds(
    ("bfloat16",), {"bfloat16": 1.6, "float16": 0.1}, {"bfloat16": 2.0, "float16": 0.2}
)
SLOW = HalfSpeeds(
    ("bfloat16",), {"bfloat16": 0.07, "float16": 0.05}, {"bfloat16": 0.1, "float16": 0.1}
)


class Machine:
    """Runs the trials of a plan in no time, one by one; a step in half takes `ms` milliseconds."""

    def __init__(self, monkeypatch, half, ms, steps=STEPS):
        self.half, self.ms, self.steps = half, ms, steps
        monkeypatch.setattr(planning, "measure_half_dtypes", lambda: half)

    def plan(self, earlier=None, **options):
        plan = Plan(SweepOptions(**options), earlier)
        plan.recognize(Kind(AMPATCH))
        return plan

    def run(self, trial, steps):
        ms = MS if trial.case == BASE else self.ms
        steps = min(filter(None, (steps, self.steps)))
        return dataclasses.replace(
            trained(trial, steps=steps, ms=ms), seconds=START + steps * ms / 1000
        )

    def sweep(self, plan, runs=(), most=999):
        """The runs of the whole plan, which is made anew after each; `most` of them."""
        runs = list(runs)
        plan.replan(runs)
        while remaining := plan.remaining({run.trial for run in runs})[:most]:
            runs.append(self.run(remaining[0], plan.steps(remaining[0], runs)))
            plan.replan(runs)
            most -= 1
        return runs


def seconds(runs):
    return sum(run.seconds for run in runs)


def whole(runs):
    """How many whole runs each level has."""
    counts = dict.fromkeys([run.case.opt_level for run in runs], 0)
    for run in runs:
        counts[run.case.opt_level] += not run.trial.short
    return counts


@pytest.mark.parametrize(
    ("half", "ms", "minutes", "seeds", "omitted"),
    [
        (FAST, 50, 10, {"O0": 5, "O1": 5, "O2": 5, "O3": 5, "autocast": 5}, ""),  # all there is
        (FAST, 50, 3, {"O0": 3, "O1": 3, "O2": 3, "O3": 3, "autocast": 3}, "2 more seeds"),
        (FAST, 50, 2.5, {"O0": 3, "O1": 3, "O2": 3, "autocast": 3}, "O3, 2 more seeds."),
        (FAST, 50, 2.1, {"O0": 3, "O1": 3, "O2": 3, "autocast": 3}, "O3, a second timing of O0"),
        (FAST, 50, 2, {"O0": 3, "O1": 3, "O2": 3, "autocast": 3}, "O3, 2 more seeds."),
        (FAST, 50, 1.5, {"O0": 1, "O1": 1, "O2": 1, "autocast": 1}, "takes 3 seeds:"),
        (FAST, 50, 1.25, {"O0": 1, "O1": 0, "O2": 0, "autocast": 0}, "takes 3 seeds:"),
        # The README's command where half is slow: that it is slow is an answer.
        (SLOW, 2600, 4, {"O0": 1, "O1": 0, "O2": 0, "autocast": 0}, "takes 3 seeds:"),
        (SLOW, 2600, 60, {"O0": 3, "O1": 3, "O2": 3, "O3": 3, "autocast": 3}, "2 more seeds"),
        # A tiny model, whose half is not slow at all: what has run says so of O3, too.
        (SLOW, 87, 6, {"O0": 4, "O1": 4, "O2": 4, "O3": 4, "autocast": 4}, "1 more seed."),
    ],
)
def test_a_budget_holds_and_has_three_seeds_first(half, ms, minutes, seeds, omitted, monkeypatch):
    machine = Machine(monkeypatch, half, ms)
    plan = machine.plan(budget=minutes)
    runs = machine.sweep(plan)
    assert whole(runs) == seeds
    assert seconds(runs) <= 60 * minutes * (1.25 if plan.chosen.tests_accuracy(plan.wanted) else 1)
    assert omitted in plan.omission_note() and bool(omitted) == bool(plan.omission_note())
    for case in {run.case for run in runs}:  # each row has rounds to tell its speed from
        assert len({run.trial.round for run in runs if run.case == case}) >= 2


@pytest.mark.parametrize(("ms", "third"), [(150, True), (400, False)])
def test_a_third_seed_follows_on_the_second_for_a_little_more(ms, third, monkeypatch):
    """On a machine that gets slower once the second seed has begun: two seeds say nothing."""
    machine = Machine(monkeypatch, FAST, 50)
    plan = machine.plan(budget=2.5)
    runs = machine.sweep(plan, most=6)
    assert plan.chosen.seeds == 3 and {run.trial.seed for run in runs} == {0, 1}
    machine.ms = ms
    runs = machine.sweep(plan, runs)
    assert plan.chosen.tests_accuracy(plan.wanted) is third
    assert (set(whole(runs).values()) >= {3}) is third
    assert not third or seconds(runs) <= 1.25 * 60 * 2.5 + START + STEPS * ms / 1000


def test_a_first_run_that_started_cold_is_no_guess_for_the_others(monkeypatch):
    """It imports what the others find in memory, as on a slow disk: 40 seconds against 4."""
    machine = Machine(monkeypatch, FAST, 50)
    plan = machine.plan(budget=4)
    cold = dataclasses.replace(machine.run(plan.trials[0], None), seconds=40 + START)
    plan.replan([dataclasses.replace(cold, imports=40)])
    assert plan.chosen.tests_accuracy(plan.wanted) and "longer" not in plan.size_note()
    plan.replan([cold])  # which says nothing of its imports
    assert not plan.chosen.tests_accuracy(plan.wanted)
    runs = machine.sweep(plan, [cold])
    assert set(whole(runs).values()) == {3} and len(whole(runs)) == 5
    assert seconds(runs) <= 4 * 60 * 1.25


def test_o3_is_left_out_only_where_it_is_a_row_that_would_run(monkeypatch):
    machine = Machine(monkeypatch, FAST, 50)
    plan = machine.plan(budget=2.1)
    runs = machine.sweep(plan)
    assert "Left out: O3, " in plan.omission_note()
    failed = machine.run(Trial(Case("O3", "bfloat16")), 1)
    failed.measured.skipped = []  # it took no step: other seeds of it are not run
    plan.replan([*runs, failed])
    assert "Left out: " in plan.omission_note() and "O3" not in plan.omission_note()
    for budget in (1, 1.1, 1.2, 1.3, 1.4):
        plain = Plan(SweepOptions(budget=budget), None)
        plain.recognize(Kind(NO_AMP))
        machine.sweep(plain, most=1)
        assert plain.omission_note() and "O3" not in plain.omission_note()


def test_no_second_o0_is_run_of_a_round_that_is_over(monkeypatch):
    """It would measure what became of the machine since, and not its noise."""
    machine = Machine(monkeypatch, FAST, 260)  # a wrong guess: the plan begins without it
    runs = machine.sweep(machine.plan(budget=3.2))
    order = [run.trial for run in runs]
    for again in (trial for trial in order if trial.again):
        before = order[: order.index(again)]
        assert all(trial.round <= again.round for trial in before if trial.case != BASE)


def test_seeds_are_interleaved_and_come_before_all_else(monkeypatch):
    """Where they fit alone: no second O0, no O3, and each seed is a round of the speed."""
    machine = Machine(monkeypatch, FAST, 50)
    runs = machine.sweep(machine.plan(budget=2.1))
    assert not any(run.trial.short for run in runs)
    rounds = [run.trial.seed for run in runs if not run.trial.short and run.case != BASE]
    assert rounds == sorted(rounds) and len(rounds) == 9


def test_whole_runs_that_cost_hardly_more_are_run_in_any_budget(monkeypatch):
    machine = Machine(monkeypatch, FAST, 1, steps=8)  # nearly all is the start of processes
    plan = machine.plan(budget=0.1)
    assert set(whole(machine.sweep(plan)).values()) == {2}
    assert "is more than the budget" in plan.size_note()


@pytest.mark.parametrize("ms", [20, 500, 20000])
@pytest.mark.parametrize("half", [FAST, SLOW], ids=["fast", "slow"])
def test_a_wrong_guess_costs_one_run_and_a_larger_budget_never_runs_less(half, ms, monkeypatch):
    machine = Machine(monkeypatch, half, ms)
    before = 0
    for minutes in (0.1, 3, 10, 40, 200):
        plan = machine.plan(budget=minutes)
        runs = machine.sweep(plan)
        said, of_one = plan.size_note(), START + STEPS * ms / 1000
        assert seconds(runs) <= 60 * minutes + of_one or "is more than the budget" in said
        assert {"O0", "O1", "O2", "autocast"} <= whole(runs).keys()
        assert sum(whole(runs).values()) >= before
        before = sum(whole(runs).values())
        assert (f"Planned for --budget {minutes:g}: " in said) and seconds(runs) == pytest.approx(
            clock(said.partition("about ")[2].partition(" in all")[0]), abs=1
        )


def test_a_second_seed_of_o0_alone_binds_no_other_row(monkeypatch):
    """It runs before the rows, which turn out to be slow."""
    machine = Machine(monkeypatch, FAST, 260)
    runs = machine.sweep(machine.plan(budget=3))
    base, *others = whole(runs).values()
    assert [run.trial.seed for run in runs[:2]] == [0, 1] and runs[1].case == BASE
    assert base > max(others) and seconds(runs) <= 180 + START + STEPS * 0.26


def clock(text):
    hours, minutes, seconds = map(int, text.split(":"))
    return 3600 * hours + 60 * minutes + seconds


def test_the_words_name_what_was_left_out_and_the_budget_that_has_it(monkeypatch):
    machine = Machine(monkeypatch, SLOW, 2600)
    plan = machine.plan(budget=4)
    assert plan.half_speed_note() == (
        "Speed of the half dtypes on this machine, relative to FP32: bfloat16 0.07x to 0.10x."
    )
    first = machine.sweep(plan, most=1)
    assert plan.chosen.seeds == 0  # by the measured speed of half: no row has run in it
    runs = machine.sweep(plan, first)
    said = plan.size_note()
    assert f"in which all but O0 take {MIN_TIMED_STEPS} steps" in said
    more = float(said.partition("--resume --budget ")[2].partition(" ")[0])
    resumed = machine.plan(earlier_of(plan, runs), budget=more, resume=True)
    all_runs = machine.sweep(resumed, runs)
    assert set(whole(all_runs).values()) == {3} and seconds(all_runs) <= 60 * more
    assert "takes 3 seeds:" not in resumed.omission_note()


def earlier_of(plan, runs):
    """The results of a sweep so far, as its directory has them."""
    settings = {**plan.settings(), "kind": dataclasses.asdict(plan.kind)}
    done, to_resume = len(runs), plan.resume_record()
    return Results("train.py", [], "", len(plan.trials), settings, {}, done=done, plan=to_resume)


@pytest.mark.parametrize("most", [0, 1, 2, 7])
def test_a_resumed_sweep_has_the_plan_of_its_directory(most, monkeypatch):
    machine = Machine(monkeypatch, SLOW, 1200)
    full = machine.plan(budget=12)
    expected = [run.trial for run in machine.sweep(full)]
    first = machine.plan(budget=12)
    runs = machine.sweep(first, most=most)
    monkeypatch.setattr(planning, "measure_half_dtypes", None)  # half is not timed again
    again = machine.plan(earlier_of(first, runs), resume=True)
    assert [run.trial for run in machine.sweep(again, runs)] == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 5),  # the default budget's
        ({"seeds": 2}, 2),
        ({"seeds": 7, "budget": 60}, 7),
        ({"rounds": 3}, 1),
        ({"jobs": 2}, 1),
        ({"levels": ["O1"]}, 1),  # nothing to compare
    ],
)
def test_what_is_planned_by_default(options, expected, monkeypatch):
    machine = Machine(monkeypatch, FAST, 10)
    plan = machine.plan(**options)
    assert {trial.seed for trial in plan.trials} == set(range(expected))
    has_budget = not options or "budget" in options
    assert "budget" not in plan.size_note()  # nothing is known yet
    assert (plan.resume_record()["budget"] is not None) is has_budget
    if not has_budget:  # an hour's seeds, if they are asked for
        machine.ms = 10000
        assert len({run.trial.seed for run in machine.sweep(plan)}) == expected


def test_more_can_be_added_to_a_sweep_that_had_a_budget(monkeypatch):
    machine = Machine(monkeypatch, SLOW, 1200)
    plan = machine.plan(budget=4)
    runs = machine.sweep(plan)
    earlier = earlier_of(plan, runs)
    rounds = machine.sweep(machine.plan(earlier, rounds=6, resume=True), runs)
    assert whole(rounds) == whole(runs) and rounds[: len(runs)] == runs
    assert len({run.trial.round for run in rounds if run.case == Case("O1", "bfloat16")}) == 6
    seeds = machine.sweep(machine.plan(earlier, seeds=2, resume=True), runs)
    assert set(whole(seeds).values()) == {2}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 0}, "--budget 0: must be above 0"),
        ({"budget": 5, "jobs": 2}, "expected trials that run one at a time"),
        ({"budget": 5, "levels": ["O1"]}, "expected O0 among the levels"),
    ],
)
def test_a_budget_that_nothing_can_be_planned_by_is_refused(options, said, monkeypatch):
    with pytest.raises(ValueError) as refused:
        Machine(monkeypatch, FAST, 10).plan(**options)
    assert said in str(refused.value)


def test_a_sweep_for_a_budget_is_gone_on_with(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, SLOW, 1200)

    def run_of(runner, trial, place):
        run = machine.run(trial, runner.steps)
        run.measured.kind = Kind(AMPATCH)
        if len(run.measured.skipped) == STEPS:
            run.measured.metrics = {"accuracy": Series([STEPS], [0.5 + trial.seed / 10])}
        return run

    stand_in(monkeypatch, run_of)
    options = {"levels": ["O0", "O2"], "autocast": False, "dtypes": None, "rounds": None}
    results = planned(tmp_path, "", budget=1e-3, **options).run().results
    base, row = results.rows
    assert results.complete and (base.metrics, row.metrics) == ({"accuracy": 0.5}, {})
    assert (base.steps, row.speeds.n, row.outcome) == (STEPS, 2, "untested")
    said = " ".join(results.notes)
    assert "bfloat16 0.07x to 0.10x" in said and "--resume --budget" in said
    more = planned(tmp_path, "", budget=60, resume=True, **options).run().results
    assert more.complete and all(row.metrics for row in more.rows)
    assert more.rows[1].comparisons[0].n == 5
    assert "longer" not in " ".join(more.notes)


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
        (
            {"devices": "cuda:0,cuda:7"},
            "there is no cuda:7 on this machine, which has 2 cuda",
        ),
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
