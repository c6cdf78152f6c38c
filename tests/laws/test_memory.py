"""Peak tensor memory of a step: O1 needs what autocast needs, O2 hardly more.

Counted to the byte by `benchmarks/run.py memory`, on small models of the shapes that are there.
"""

from functools import partial

import pytest
import torch
from bench_modules import load

import ampatch

counts, systems, tasks = load("counts"), load("systems"), load("tasks")
TASKS = {
    "MLP": partial(tasks.mlp, 8, 64, batch=128),
    "conv net": partial(tasks.conv_net, [3, 16, 16, 16], batch=8, pixels=8),
    "transformer": partial(tasks.encoder, 32, 4, 4, batch=16, length=8, inner=2),
    "LSTM": partial(tasks.lstm, 32, batch=16, length=16),
}
"""Activations and optimizer state both take memory."""


def of_autocast(build, adam):
    try:
        systems.make_step(build(), systems.AUTOCAST)()
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"autocast cannot run it here: {error}")
    return counts.peak_bytes(build, systems.AUTOCAST, **adam)


@pytest.mark.parametrize(
    ("name", "adam"),
    [*((name, {}) for name in TASKS), ("MLP", {"foreach": True}), ("MLP", {"fused": True})],
    ids=str,
)
def test_peak_memory_is_that_of_autocast(name, adam):
    build = TASKS[name]
    base = of_autocast(build, adam)
    assert counts.peak_bytes(build, "O1", **adam) <= 1.001 * base
    # foreach Adam makes copies of all gradients: where that is the peak, half weights come on top
    extra = 2 * sum(p.numel() for p in build().modules[0].parameters()) if "foreach" in adam else 0
    assert counts.peak_bytes(build, "O2", **adam) <= 1.02 * base + extra


def test_counting_sees_what_is_alive_at_once():
    """Two tensors of 4000 bytes at a time, three made; views and in-place work add none."""
    with counts.LiveBytes() as live:
        first = torch.ones(1000)
        second = first + 1
        del first
        third = second * 2
        third.view(10, 100).add_(1)
    assert (live.now, live.peak) == (8000, 8000)
    del second, third
    assert live.now == 0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_memory_is_flat_over_steps(level):
    """What is alive after a step is what was alive after the step before.

    But for the scales of the last blocks, a number each, until as many as are kept are there.
    """
    with counts.LiveBytes() as live:
        step = systems.make_step(tasks.mlp(2, 16, batch=4), level)
        after = []
        for _ in range(140):
            step()
            after.append(live.now)
    ampatch.deactivate()
    assert len(set(after[-5:])) == 1
    assert after[-1] - after[counts.BEFORE_THE_PEAK] < 140 * 4
