"""Peak tensor memory of a step: O1 needs what autocast needs, O2 hardly more.

Counted to the byte by `benchmarks/run.py memory`, on small models of the shapes that are there.
"""

from functools import partial

import pytest
import torch
from bench_modules import load
from torch import nn
from torch.func import functional_call

import ampatch

counts, systems, tasks = load("counts"), load("systems"), load("tasks")
TASKS = {
    "MLP": partial(tasks.mlp, 8, 64, batch=128),
    "conv net": partial(tasks.conv_net, [3, 16, 16, 16], batch=8, pixels=8),
    "transformer": partial(tasks.encoder, 32, 4, 4, batch=16, length=8, inner=2),
    "LSTM": partial(tasks.lstm, 32, batch=16, length=16),
}
"""Activations and optimizer state both take memory."""


class HalfCopies(nn.Module):
    """Autocast by hand, where torch's own cannot run a model: a half copy of each weight."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        copies = {name: p.bfloat16() for name, p in self.model.named_parameters()}
        return functional_call(self.model, copies, (x.bfloat16(),))


def of_autocast(build, adam):
    """The peak under autocast, and what part of it O1 may need."""
    try:
        systems.make_step(build(), systems.AUTOCAST)()
    except (RuntimeError, NotImplementedError):  # torch cannot run this here

        def by_hand():
            task = build()
            return task._replace(modules=[HalfCopies(*task.modules)])

        return counts.peak_bytes(by_hand, systems.FP32, **adam), 1.02
    return counts.peak_bytes(build, systems.AUTOCAST, **adam), 1.001


@pytest.mark.parametrize(
    ("name", "adam"),
    [*((name, {}) for name in TASKS), ("MLP", {"foreach": True}), ("MLP", {"fused": True})],
    ids=str,
)
def test_peak_memory_is_that_of_autocast(name, adam):
    build = TASKS[name]
    base, part = of_autocast(build, adam)
    assert counts.peak_bytes(build, "O1", **adam) <= part * base
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
