"""What a training step consists of, counted exactly: operators, casts, waits for the device.

Counted by `benchmarks/run.py counts` on its own models.  These counts hold what was gained;
where less is done, lower the numbers in `MORE`.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from bench_modules import load
from torch import nn

import ampatch

counts, systems = load("counts"), load("systems")

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
