"""What `ampatch doctor` calls faster, slower or a tie, also where other processes take the time."""

import random
import types

import pytest
import torch

import ampatch
from ampatch.diagnose import speed

FLOAT16, BFLOAT16 = speed.HALF_DTYPES


@pytest.fixture
def machine(monkeypatch):
    """`machine(seconds, stalled)`: each call takes `seconds[dtype]`, and a share is stalled."""

    def pretend(seconds: dict[torch.dtype, float], stalled: float = 0.0) -> None:
        clock, chance = [0.0], random.Random(1)

        def operation(dtype):
            def run():
                stall = chance.uniform(0.004, 0.1) if chance.random() < stalled else 0.0
                clock[0] += seconds[dtype] + stall

            return run

        monkeypatch.setattr(speed, "operations", lambda device, dtype: {"matmul": operation(dtype)})
        monkeypatch.setattr(speed, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))

    return pretend


@pytest.mark.parametrize("stalled", [0.0, 0.6])
@pytest.mark.parametrize(
    ("times", "expected", "fast"),
    [
        ((30.0, 0.4), ("slower", "faster"), ("bfloat16",)),
        ((0.5, 0.97), ("faster", "tie"), ("float16",)),
        ((1.05, 1.3), ("tie", "slower"), ()),
        ((1.0, 1.0), ("tie", "tie"), ()),
    ],
)
def test_verdicts_on_an_idle_and_on_a_busy_machine(times, expected, fast, stalled, machine):
    seconds = dict(zip((torch.float32, *speed.HALF_DTYPES), (1e-3, *(1e-3 * t for t in times))))
    machine(seconds, stalled)
    of_types = {timed.dtype: timed.verdict for timed in speed.measure_speeds("cpu")}
    assert (of_types[FLOAT16], of_types[BFLOAT16]) == expected
    assert of_types[torch.float32] == "tie"
    types = speed.half_speeds("cpu")
    assert types.fast == fast and types.lowest == types.highest  # there is one operation
    assert types.lowest == pytest.approx(
        {str(d).removeprefix("torch."): 1 / t for d, t in zip(speed.HALF_DTYPES, times)}, rel=0.1
    )


@pytest.mark.parametrize(
    "ratio, low, high, verdict, figure",
    [
        (2.0, 0.8, 3.0, "tie", "2.00x (0.80 to 3.00)"),  # its range reaches across 1
        (0.5, 0.4, 1.2, "tie", "0.50x (0.40 to 1.20)"),
        (0.5, 0.4, 0.6, "slower", "0.50x (0.40 to 0.60)"),
        (0.007, 0.006, 0.008, "slower", "under 0.1x"),
    ],
)
def test_verdicts_and_figures(ratio, low, high, verdict, figure):
    timed = speed.Speed("matmul", BFLOAT16, ratio, low, high)
    assert (timed.verdict, timed.figure()) == (verdict, figure)
    fast = speed.Speed("conv2d", BFLOAT16, 3.0, 3.0, 3.0)
    assert speed.faster_dtypes([timed, fast]) == (("bfloat16",) if verdict == "tie" else ())


def test_torch_is_measured_and_not_the_casts(monkeypatch):
    ampatch.initialize(torch.nn.Linear(1, 1), opt_level="O1", verbosity=0)
    monkeypatch.setattr(speed, "MIN_ROUNDS", 3)
    monkeypatch.setattr(speed, "MAX_SECONDS", 0)
    seen = []
    find = speed.operations

    def noting(device, dtype):
        runs = find(device, dtype)
        seen.extend(gradient.dtype is dtype for run in runs.values() for gradient in run())
        return runs

    monkeypatch.setattr(speed, "operations", noting)
    threads = torch.get_num_threads()
    speed.measure_speeds("cpu")
    assert seen and all(seen)
    assert torch.get_num_threads() == threads
