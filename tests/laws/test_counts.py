"""What a training step consists of, counted exactly: operators, casts, waits, bytes of memory.

Counted by `benchmarks/run.py counts` and `memory`, on small models.  These counts hold what was
gained; where less is done, lower the numbers in `MORE`.
"""

import functools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from bench_modules import load
from torch import nn

import ampatch

counts, systems, tasks = load("counts"), load("systems"), load("tasks")

MLP, LINEARS = "MLP, 8 layers", "200 Linear(8, 8)"
CASTS = 8
MORE = {  # operators at O1 and at O2, with dynamic loss scale, that plain FP32 does without
    # at O2 one looks at the input, which is in host memory;
    # two new tensors for each weight: a half copy, and its gradient widened;
    # four for the loss scale, which is a tensor on the CPU too
    (MLP, "ordinary"): (40, 41),  # on top of 149, in torch 2.13
    (MLP, "fused"): (40, 41),  # on top of 134
    (LINEARS, "ordinary"): (832, 833),  # on top of 2809
    (LINEARS, "fused"): (832, 833),  # on top of 2410
}
WEIGHTS = 16  # of the MLP
LEVELS = ("O1", "O2")


@functools.cache
def of_fp32(name, optimizer):
    return counts.count(name, systems.FP32, optimizer).operators


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("name", "optimizer"), MORE, ids=str)
def test_a_step_does_no_more_than_this(name, optimizer, level):
    results = counts.count(name, level, optimizer, torch.float16)
    assert results.casts <= CASTS
    assert results.syncs <= (0 if optimizer == "fused" else 1)
    assert results.operators - of_fp32(name, optimizer) <= MORE[name, optimizer][level == "O2"]


@pytest.mark.parametrize("optimizer", ["ordinary", "fused"])
def test_autocast_does_more_and_the_counting_sees_it(optimizer):
    """Each weight is cast for itself forward and backward, and the step waits (or is told)."""
    results = counts.count(MLP, systems.AUTOCAST, optimizer)
    assert results.casts >= 2 * WEIGHTS
    assert results.syncs == (0 if optimizer == "fused" else 1)
    assert results.operators - of_fp32(MLP, optimizer) >= 2 * WEIGHTS


def step_of(layers, level):
    torch.manual_seed(0)
    inputs, targets = torch.randn(4, 8), torch.randint(0, 8, (4,))
    task = counts.TASKS[MLP]()._replace(
        modules=[nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])],
        losses=[lambda modules: F.cross_entropy(modules[0](inputs), targets)],
    )
    return systems.make_step(task, level, systems.How(optimizer=systems.FUSED))


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_grows_linearly_with_the_parameters(level):
    results = []
    for layers in (16, 32, 48):  # with the weights of a bucket more each time
        step = step_of(layers, level)
        operators = counts.count_step(step).operators
        results.append((operators, counts.calls(step)))
        ampatch.deactivate()
    first, second, third = results
    for small, middle, large in zip(first, second, third, strict=True):
        assert large - middle == middle - small > 0


# Peak tensor memory, to the byte: O1 needs what autocast needs, O2 hardly more

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
