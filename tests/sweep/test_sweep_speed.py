"""Speed: rounds and short runs, of times made by hand.  Rows that are not what they are called."""

import dataclasses
import itertools
import json
import math
import subprocess
import types

import pytest
import torch
from sweep_made import trained
from sweep_runs import INITIALIZE, TRAINING, Said, planned, written

from ampatch import native
from ampatch.cli.main import main
from ampatch.diagnose.speed import HalfSpeeds
from ampatch.sweep import Sweep, read_runs
from ampatch.sweep.cases_and_trials import cases, trials
from ampatch.sweep.execution import half_dtypes, runner
from ampatch.sweep.execution.budget import MIN_SHORT_STEPS, is_due, short_steps
from ampatch.sweep.execution.runner import Runner
from ampatch.sweep.measure import machine
from ampatch.sweep.report.first_loss_check import first_loss_differences
from ampatch.sweep.report.provenance import machine_state
from ampatch.sweep.report.recommendation import recommendation
from ampatch.sweep.report.rows import seeds_matter, summarize
from ampatch.sweep.trial import BASE, Case, Trial

ROWS = cases(["O0", "O1"], ["bfloat16"])


def run_of(trial, ms=10.0, **more):
    return trained(trial, ms=ms, **more)


def swept(o0, again, o1, seeds=1, cpu=None):
    """The rows of a sweep in whose rounds O0, O0 again and O1 took so many milliseconds.

    `cpu` has the same of CPU time.  Without `again` each round is a seed.
    """
    planned = trials(ROWS, seeds, rounds=len(o0))
    if again is None:
        planned = [Trial(case, seed) for case in ROWS for seed in range(len(o0))]
    rounds, runs = sorted({trial.round for trial in planned}), []
    for trial in planned:
        which, number = 1 if trial.again else 2 * (trial.case != BASE), rounds.index(trial.round)
        fields = {"cpu_seconds": [None, *[cpu[which][number] / 1000] * 39]} if cpu else {}
        runs.append(run_of(trial, (o0, again, o1)[which][number], **fields))
    return summarize(runs)


@pytest.mark.parametrize(("seeds", "whole", "short"), [(1, 2, 7), (2, 4, 5), (3, 6, 3), (4, 8, 4)])
def test_there_are_three_rounds_with_any_number_of_seeds(seeds, whole, short):
    plan = trials(ROWS, seeds)
    assert (len([trial for trial in plan if not trial.short]), len(plan)) == (whole, whole + short)
    rounds = {}
    for trial in plan:
        rounds.setdefault(trial.round, []).append(trial)
    assert len(rounds) == max(3, seeds)
    for number, its_trials in enumerate(rounds.values()):
        forwards = its_trials if number % 2 == 0 else its_trials[::-1]
        if number == 1 and seeds > 1:  # its O0 has run at once after the first
            assert forwards[-1] == plan[1] == Trial(BASE, 1)
            forwards = [forwards[-1], *forwards[:-1]]
        assert [trial.case for trial in forwards] == [*ROWS, BASE]
        assert [trial.again for trial in forwards] == [False, False, True]
        assert forwards[-1].short
    assert not plan[0].short and plan[0].case == BASE  # it says how long a short run is
    for name in ("file_stem", "label"):
        assert len({getattr(trial, name) for trial in plan}) == len(plan)


def test_without_anything_to_compare_there_are_no_rounds():
    for rows, rounds in (([BASE], 3), (ROWS[1:], 3), (ROWS, 1)):
        assert trials(rows, seeds=1, rounds=rounds) == [Trial(case) for case in rows]


def test_short_runs_take_seconds_and_enough_steps_and_none_is_due_where_a_row_failed():
    first = Trial(BASE)
    assert short_steps([run_of(first, ms=10.0)]) == 300
    assert short_steps([run_of(first, ms=2000.0)]) == MIN_SHORT_STEPS
    assert short_steps([run_of(Trial(ROWS[1])), run_of(Trial(BASE, short=True))]) is None
    without_base = [run_of(first, error="RuntimeError: no"), run_of(Trial(ROWS[1]))]
    assert short_steps(without_base) is None
    assert not is_due(Trial(ROWS[1], repeat=1, short=True), without_base)
    without_row = [run_of(first), run_of(Trial(ROWS[1]), error="RuntimeError: no")]
    assert is_due(Trial(ROWS[1], seed=1), without_row)
    again = run_of(Trial(BASE, short=True, again=True), error="RuntimeError: no")
    assert is_due(Trial(ROWS[1], repeat=1, short=True), [run_of(first), again])  # O0 has run


def test_a_row_is_faster_if_the_machine_is_quiet_and_the_quartiles_agree():
    base, row = swept([10, 20, 10], [10.2, 19.9, 10.1], [5, 8, 6])
    assert (row.pace, row.speed, row.speeds.n) == ("faster", pytest.approx(2.0), 3)
    assert (row.speeds.low, row.speeds.high) == pytest.approx((10 / 6, 2.5))
    assert base.speed == pytest.approx(10 / 10.1)
    assert "the second of its two runs was 0.99 times as fast (0.98 to 1.01)" in base.verdict
    assert recommendation([base, row]) == (
        "Stay with O0 for now. Speed: O1 in bfloat16 is 2.00 times as fast as O0 (1.67 to 2.50). "
        "Accuracy: O1 in bfloat16: no loss or metric was compared with O0's."
    )
    assert swept([10] * 3, [10] * 3, [20, 25, 22])[1].pace == "slower"


@pytest.mark.parametrize(
    ("again", "o1"),
    [
        ([10, 12, 11], [8.5, 8.5, 8.5]),
        ([7, 10, 10], [8, 5, 5]),
        ([13, 10, 10], [8, 5, 5]),
        ([10, 10, 10], [5, 8, 13]),
    ],
)
def test_what_noise_could_have_done_is_not_recommended(again, o1):
    base, row = swept([10] * 3, again, o1)
    assert row.pace == "not told apart" and ", which may be noise: " in row.verdict
    why = f"runs of O0 itself differed by a factor of {row.reach:.2f}"
    if row.speeds.low < 1 < row.speeds.high:
        why = "rounds do not agree"
    assert why in row.verdict
    advice = recommendation([base, row])
    assert advice.startswith("Stay with O0 for now. Speed: O1 in bfloat16 is ") and why in advice
    assert advice.endswith("To settle it, on an idle machine: --resume --rounds 6.")


@pytest.mark.parametrize(
    ("o0", "again", "o1", "pace"),
    [
        ([10] * 3, [10, 14, 13], [300, 400, 350], "slower"),
        ([10] * 3, [10, 14, 13], [3, 3, 3], "faster"),
        ([10] * 5, [12, 12, 13, 12, 40], [4] * 5, "not told apart"),  # O0 was 0.25 of itself
        ([10] * 5, [12, 12, 13, 12, 40], [2] * 5, "faster"),
        *(([10] * 3, [first, 10, 10], [5] * 3, "faster") for first in (7, 13)),  # one round was off
        *(([10] * 3, [first, 10, 10], [20] * 3, "slower") for first in (7, 13)),
        # where O0 ran once in a round, its rounds are its noise
        ([10, 10.1, 10], None, [5] * 3, "faster"),
        ([10, 10.1, 10], None, [20] * 3, "slower"),
        ([10, 14, 10], None, [8] * 3, "not told apart"),  # O0 itself was 1.40 times as slow
        ([10, 14, 10], None, [5, 7, 5], "faster"),  # but here by more, round by round
        ([10, 10.1], None, [5] * 2, "too few rounds"),
    ],
)
def test_a_ratio_that_noise_cannot_explain_is_told_on_a_busy_machine(o0, again, o1, pace):
    rows = swept(o0, again, o1)
    assert rows[1].pace == pace
    slower = "Stay with O0: no row is at least 1.05 times as fast. The fastest, O1 bfloat16, is 0."
    assert recommendation(rows).startswith(slower) == (pace == "slower")


BUSY = [10, 14, 13], [9, 14, 8]
QUIET = [10, 10, 10], [10, 10, 10.1]
OF_CPU = [10, 10, 10], [10, 10.1, 9.9]


@pytest.mark.parametrize(
    ("wall", "cpu", "pace", "by_cpu"),
    [
        (BUSY, [20, 21, 20], "slower", True),
        (BUSY, [5, 5, 5], "faster", True),
        (BUSY, [9, 10, 11], "not told apart", False),
        (BUSY, None, "not told apart", False),  # as on an accelerator
        (QUIET, [5, 5, 5], "not told apart", False),  # wall time says that it is as fast
        (([10, 14, 13], [3, 3, 3]), [20, 20, 20], "faster", False),  # and here that it is faster
    ],
)
def test_where_wall_time_is_too_noisy_cpu_time_decides(wall, cpu, pace, by_cpu):
    base, row = swept([10] * 3, *wall, cpu=cpu and (*OF_CPU, cpu))
    assert (row.pace, row.by_cpu) == (pace, by_cpu)
    noisy = "by CPU time (wall time is too noisy: 1.11 (0.71 to 1.25))"
    assert (noisy in row.verdict) == by_cpu
    advice = recommendation([base, row])
    if by_cpu:
        assert ("is 2.00 times as fast as O0" if pace == "faster" else "is 0.50 times") in advice
        assert noisy in advice


@pytest.mark.parametrize(("later", "rounds"), [(60.0, 3), (3600.0, 2)])
def test_runs_of_a_round_that_were_far_apart_are_not_compared_in_speed(later, rounds):
    """As those of rows that another day adds: the machine may be another one by then."""
    runs = []
    for seed, (case, ms) in itertools.product(range(3), zip(ROWS, (10.0, 5.0))):
        began = 100.0 * seed + (case != BASE) * 40
        run = run_of(Trial(case, seed), ms, machine={"began": began})
        runs.append(dataclasses.replace(run, seconds=40.0))
    runs[-1].measured.machine["began"] += later
    assert summarize(runs)[1].speeds.n == rounds


def test_a_row_that_trains_the_same_as_another_and_is_slower_says_so():
    """Of a pair: the slower one, and beside O0."""
    rows = cases(["O0", "O1", "O2"], ["bfloat16"])
    times = {rows[0]: 10.0, rows[1]: 20.0, rows[2]: 30.0}
    planned = trials(rows, 1)
    runs = [run_of(trial, times[trial.case], losses=[1.0, 0.5]) for trial in planned]
    base, faster, slower = summarize(runs)
    assert "trains the same" not in base.verdict
    assert faster.verdict.endswith("; trains the same as O0 float32, and is slower")
    assert slower.verdict.endswith("the same as O0 float32 and O1 bfloat16, and is slower")
    for run in runs:
        run.measured.losses["0"].values[1] = len(run.case.label)
    assert not any("trains the same" in row.verdict for row in summarize(runs)[:2])


def test_one_round_recommends_nothing():
    base, row = swept([10.0], [], [1.0])
    assert (row.pace, base.speed) == ("too few rounds", None)
    assert "--rounds 3" in recommendation([base, row])


def test_short_runs_count_for_times_alone():
    """A short O0 beside a whole one is compared over its own steps, which may be others' longer."""
    whole = {"losses": [1.0], "accuracy": 0.9}
    later = [10.0] * 39 + [30.0] * 60
    runs = [
        run_of(Trial(BASE), later, **whole),
        run_of(Trial(ROWS[1]), 5.0, **whole, memory_bytes=7, cpu_seconds=[None, *[0.02] * 40]),
        run_of(Trial(BASE, short=True, again=True), losses=[9.0]),
        run_of(Trial(BASE, repeat=1, short=True), losses=[9.0]),
        run_of(Trial(ROWS[1], repeat=1, short=True), 15.0, memory_bytes=9),
    ]
    base, row = summarize(runs)
    assert (base.speed, base.steps, base.last_loss) == (1.0, 100, 1.0)
    assert (row.step_ms, row.cpu_ms, row.steps, row.memory_bytes) == (10.0, 20.0, 40, 7)
    assert (row.last_loss, row.metrics) == (1.0, {"accuracy": 0.9})
    means = {metric.name: metric.base_mean for metric in row.comparisons}
    assert means == {"last loss": 1, "accuracy": 0.9}
    same = [run_of(Trial(BASE, seed), losses=[1.0]) for seed in (0, 1)]
    assert not seeds_matter([*same, *runs[2:]])


@pytest.mark.parametrize(
    "states, said",
    [
        ([True, True], "active"),
        ([False], "not active"),
        ([True, False], "active in some runs only: do not compare their speeds with others"),
        ([None], None),  # as an older ampatch wrote it
    ],
)
def test_the_state_of_the_machine_is_told_of_all_runs(monkeypatch, states, said):
    """As the trials found it: a cluster's machines may have no build."""
    monkeypatch.setattr("os.getloadavg", lambda: (2.5, 0, 0))
    runs = []
    for active in states:
        status = native.Status(active, "")
        monkeypatch.setattr(native, "status", lambda status=status: status)
        state = machine.machine_conditions()
        assert (state["load_at_start"], state["threads"]) == (2.5, torch.get_num_threads())
        more = {"load_at_end": 0.5, "cores": 64, "threads": 2}
        runs.append(run_of(Trial(BASE), machine={**state, **more}))
    told = machine_state(runs)
    assert told.get("native part") == said
    assert (told["threads"], told["load average"]) == ("2 on 64 cores", "0.5 to 2.5")
    assert machine_state([]) == {}


def test_an_accelerator_is_asked_in_a_process_of_its_own(monkeypatch):
    answer = HalfSpeeds(["float16"], {"float16": 2.0}, {"float16": 3.0})
    ends = [(1, "", "RuntimeError: CUDA error"), (0, json.dumps(dataclasses.asdict(answer)), "")]
    processes = types.SimpleNamespace(
        run=lambda command, **_: subprocess.CompletedProcess(command, *ends.pop())
    )
    monkeypatch.setattr(half_dtypes, "accelerator", lambda: "cuda")
    monkeypatch.setattr(half_dtypes, "subprocess", processes)
    assert half_dtypes.measure_half_dtypes() == answer
    with pytest.raises(ValueError, match="RuntimeError: CUDA error. Name the dtypes .* --dtypes"):
        half_dtypes.measure_half_dtypes()


def test_runs_have_glibc_keep_its_memory_unless_the_user_says_otherwise(monkeypatch, tmp_path):
    def start(*command, env, **_):
        environment.update(env)
        raise KeyboardInterrupt

    for name in runner.MALLOC_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    environment = {}
    processes = types.SimpleNamespace(**{**vars(subprocess), "Popen": start})
    monkeypatch.setattr(runner, "subprocess", processes)
    (tmp_path / "train.py").write_text("")
    with pytest.raises(KeyboardInterrupt):
        Sweep(tmp_path / "train.py", levels=["O0"], seeds=1, out=tmp_path / "out").run()
    expected = {**runner.MALLOC_VARIABLES, "MALLOC_TOP_PAD_": "1"}
    assert {name: environment.get(name) for name in expected} == expected


O0, BFLOAT16, FLOAT16 = Case("O0"), Case("O1", "bfloat16"), Case("O1", "float16")


def run_at(case, first, then=(1.0,) * 30, seed=0, **kind):
    return trained(Trial(case, seed, **kind), [first, *then])


TF32, WITH_SETTING = Case("O0", tf32=True), Case("O0", settings=(("loss_scale", 2.0),))
NEAR_ZERO, NOISY = (0.02, -0.03) * 10, (1.5, 2.1) * 10  # as a policy's loss; other noise in half


@pytest.mark.parametrize(
    "base, first, then, case, apart",
    [  # 32 units of roundoff: of 2**-11 and 2**-8 relative to the loss; FP32 2**-10
        *((2.0, 2.0 * (1 + 31 * 2**-11), (1.0,), case, False) for case in (FLOAT16, TF32)),
        *((2.0, 2.0 * (1 + 34 * 2**-11), (1.0,), case, True) for case in (FLOAT16, TF32)),
        (2.0, 2.0 * (1 - 31 * 2**-8), (1.0,), BFLOAT16, False),
        (2.0, 2.0 * (1 - 34 * 2**-8), (1.0,), BFLOAT16, True),
        (1e-9, 1e-3, NEAR_ZERO, BFLOAT16, False),
        (1e-9, 1e-3, (1e-3,) * 20, BFLOAT16, True),
        (2.0, 1.6, NOISY, BFLOAT16, False),
        (2.0, 1.2, NOISY, BFLOAT16, True),
        (2.0, 1.6, NOISY, WITH_SETTING, True),
        *((2.0, lost, (1.0,), FLOAT16, False) for lost in (math.nan, math.inf)),  # an overflow
        *((lost, 2.0, (1.0,), FLOAT16, False) for lost in (math.nan, math.inf)),
    ],
)
def test_half_may_round_and_no_more(base, first, then, case, apart):
    """A loss is measured by its later size, and by how much it differs from step to step."""
    runs = [run_at(O0, base, then=then * 30), run_at(case, first, then=then * 30)]
    assert bool(first_loss_differences(runs)) == apart


def test_the_second_o0_is_compared_too():
    again = run_at(O0, 2.003, short=True, again=True)
    [(run, _said)] = first_loss_differences([run_at(O0, 2.0), again])
    assert run is again
    assert not first_loss_differences([run_at(O0, 2.0), run_at(O0, 2.001, short=True, again=True)])
    assert not first_loss_differences([run_at(O0, 2.0), run_at(O0, 3.0, seed=1)])  # another seed


def test_losses_behind_a_step_say_nothing_of_the_start():
    """A generator's first loss comes behind the discriminator's step, which float16 may skip."""
    base, row = run_at(O0, 2.0), run_at(FLOAT16, 0.7)
    of_base, of_row = base.measured.losses, row.measured.losses
    of_row["1"] = of_row.pop("0")
    assert not first_loss_differences([base, row])
    of_base["1"] = of_base.pop("0")
    assert first_loss_differences([base, row])
    of_base["1"].steps = of_row["1"].steps = list(range(1, 32))
    assert not first_loss_differences([base, row])


def test_nothing_is_recommended_where_a_row_starts_elsewhere():
    base, row = rows = summarize([run_at(O0, 2.0), run_at(BFLOAT16, 0.5)])
    assert "first loss 0.5 against 2 of O0 with seed 0" in row.verdict
    assert recommendation(rows).startswith("None") and "first loss 0.5" in recommendation(rows)
    assert (base.outcome, row.outcome, row.comparisons) == ("baseline", "untested", [])
    rows = summarize([run_at(O0, 2.0), run_at(O0, 0.1, short=True, again=True)])
    assert "0.1 against 2 of its first run with seed 0" in rows[0].verdict
    assert recommendation(rows).startswith("None")


def test_weights_from_another_rows_file_are_said_once(tmp_path, monkeypatch):
    first = {"O0": 2.0, "O1": 0.5}
    monkeypatch.setattr(
        Runner,
        "run",
        lambda runner, trial, *_: run_at(trial.case, first[trial.case.opt_level]),
    )
    sweep, said = planned(tmp_path, "", levels=["O0", "O1"], autocast=False), Said()
    sweep.run(said)
    assert sweep.results.recommendation.startswith("None: the rows' first losses differ by more")
    assert "TRIAL_DIR" not in sweep.results.recommendation
    [text] = [text for text in said.events if "AMPATCH_TRIAL_DIR" in text]
    assert text in sweep.results.notes


def test_steps_without_a_loss_are_said_once(tmp_path, monkeypatch):
    """As where gradients come by torch.autograd.grad: nothing can be judged by the loss."""
    monkeypatch.setattr(Runner, "run", lambda runner, trial, *_: trained(trial))
    sweep, said = planned(tmp_path, "", levels=["O0"], seeds=2), Said()
    sweep.run(said)
    [text] = [text for text in said.events if "no loss was recorded" in text]
    assert text in sweep.results.notes
    for remedy in ("--metric", "ampatch.log_metrics(loss=...)"):
        assert remedy in text


@pytest.mark.usefixtures("warm_trials")
def test_o0_is_fp32_where_the_script_enters_autocast(tmp_path, monkeypatch, capsys):
    body = """
        from torch import autocast as early
        from torch.amp import autocast
        from torch.cuda.amp import autocast as of_cuda
        from torch.cpu.amp import autocast as of_cpu

        inputs = torch.randn(64, 8)

        @autocast("cpu", dtype=torch.bfloat16)
        def decorated():
            return inputs @ inputs.T

        dtypes = {str(decorated().dtype)}
        for region in (
            early("cpu", dtype=torch.bfloat16),
            torch.autocast(device_type="cpu", dtype=torch.bfloat16, enabled=True),
            of_cpu(dtype=torch.bfloat16),
            of_cuda(),
        ):
            with region:
                dtypes.add(str((inputs @ inputs.T).dtype))
                assert not (os.environ["AMPATCH_OPT_LEVEL"] == "O0" and torch.is_autocast_enabled())
        never_entered = torch.autocast("cpu", dtype=torch.bfloat16)
        amp.log_metrics(kinds=len(dtypes), halves=sum(dtype != "torch.float32" for dtype in dtypes))
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                step()
    """
    written(tmp_path, TRAINING, INITIALIZE, body)
    monkeypatch.chdir(tmp_path)
    words = "--levels O0,O1 --dtypes bfloat16 --rounds 1 --no-autocast --out results".split()
    assert main(["sweep", "train.py", *words]) == 0
    results = tmp_path / "results"
    base, other = (next(read_runs(results, label)).measured for label in ("O0", "O1-bfloat16"))
    assert base.metrics["halves"].values == [0] and base.metrics["kinds"].values == [1]
    assert other.metrics["halves"].values == [1] and not other.autocast_off
    lines = (tmp_path / "train.py").read_text().splitlines()
    noted = {lines[int(place.partition(":")[2]) - 1].strip() for place in base.autocast_off}
    assert noted == {
        "dtypes = {str(decorated().dtype)}",
        "with region:",
        'with torch.autocast("cpu", dtype=torch.bfloat16):',
    }
    said = capsys.readouterr().err
    for text in (said, (results / "report.html").read_text(), (results / "summary.md").read_text()):
        assert "train.py enters torch.autocast itself (train.py:" in text
