"""Ctrl-C in blocks, clipping, steps and zeroes: at every call and line of the optimizer side.

A training does a few micro-batches and steps; in one of its phases an exception strikes, at one
point after the other.  What the script does then (go on, or zero the gradients and go on) leads to
weights that a run without the fault reaches too: with the struck micro-batch, without it, or
without those before it; a step that was made may be made again.  Never to gradients that are
scaled, counted twice or not finite, never to a block or a step that is refused for good.
"""

import itertools
import math
import re
from pathlib import Path

import pytest
import strikes
import torch
import torch.nn.functional as F
from small_training import backward, close, data, float_grads, grads, seeded
from torch import nn

import ampatch

FILES = tuple(map(str, Path(strikes.ROOT, "scaling").glob("*.py")))
ROOMS = ("api", "session", "interop")  # where calls are struck alone
BLOCKS = re.compile(r"^\s*with ")  # a signal waits for its exit


class Training:
    def __init__(self, options=None, **settings) -> None:
        self.options = options or {}
        self.number, self.where, self.phase, self.tries_again = 0, "", "", False
        self.model = seeded()
        self.begin = [param.detach().clone() for param in self.model.parameters()]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batches = [data(number) for number in range(4)]
        settings = {"opt_level": "O1", "init_scale": SCALE, "verbosity": 0, **settings}
        ampatch.initialize(self.model, self.optimizer, **settings)

    def during(self, phase, act):
        if phase != self.phase:
            act()
            return False
        _, self.where = strikes.lines(act, FILES, self.number, ROOMS, BLOCKS)
        return bool(self.where)

    def micro(self, number, factor=1.0, is_struck=False):
        inputs, targets = self.batches[number]
        loss = F.mse_loss(self.model(inputs).float(), targets) * factor
        scaled = block = None

        def enter():
            nonlocal scaled, block
            block = ampatch.scale_loss(loss, self.optimizer, **self.options)
            scaled = block.__enter__()

        phase, self.phase = self.phase, self.phase if is_struck else ""
        try:
            if not self.during("enter", enter):
                scaled.backward()
                self.during("leave", lambda: block.__exit__(None, None, None))
        finally:
            self.phase = phase

    def step(self):
        if self.during("clip", self.clip):
            self.clip()
        if self.during("step", self.optimizer.step) and self.tries_again:
            self.optimizer.step()

    def clip(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 100.0)

    def zero(self):
        if self.during("zero_grad", self.optimizer.zero_grad):
            self.optimizer.zero_grad()

    def run(self, micros=(0, 1, 2), steps=1, factor=1.0):
        """The weights after these micro-batches, a step, and a plain one."""
        with torch.no_grad():
            for param, value in zip(self.model.parameters(), self.begin, strict=True):
                param.copy_(value)
        ampatch.set_loss_scale(SCALE)
        for number in micros:
            is_bad = number == 1
            self.micro(number, factor if is_bad else 1.0, is_bad)
        for _ in range(steps):
            self.step()
        self.zero()
        self.phase = ""
        self.micro(3)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.cat([value.detach().flatten() for value in self.model.parameters()])


SCALE = 1024.0
WAYS = {
    "plain": {},
    "waits scaled": {"options": {"delay_unscale": True}},
    "static": {"loss_scale": SCALE},
    "O2": {"opt_level": "O2"},
}
PHASES = ["enter", "leave", "clip", "step", "step, tried again", "zero_grad"]
SUBSETS = [((0, 1, 2), 1), ((0, 2), 1), ((2,), 1), ((), 0)]


@pytest.mark.parametrize(
    "way, factor",
    [
        *itertools.product(("plain", "static", "O2"), [1.0]),
        *itertools.product(("plain", "waits scaled"), [math.inf]),
        pytest.param("waits scaled", 1.0, marks=pytest.mark.slow),
        pytest.param("O2", math.inf, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # generators closed
def test_a_fault_at_any_point_is_the_run_with_or_without_what_it_struck(phase, way, factor):
    """With an overflow the struck micro-batch leaves the step out, or is left out of it."""
    training = Training(**WAYS[way])
    made_again = [((0, 1, 2), 2)] if "again" in phase else []
    subsets = [*SUBSETS, *made_again]
    if factor != 1.0:
        subsets = [(micros, steps) for micros, steps in subsets if 1 not in micros]
    expected = [training.run(*subset) for subset in subsets]
    struck = phase.partition(",")[0]
    training.tries_again = "again" in phase
    for number in itertools.count(1):
        training.number, training.where, training.phase = number, "", struck
        values = training.run(factor=factor)
        is_right = [torch.allclose(values, weights, atol=1e-6) for weights in expected]
        assert any(is_right), training.where
        if not training.where:
            break
    assert number > 10


def test_a_zeroing_that_raised_leaves_gradients_that_are_known_to_wait_scaled():
    class Raises(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            raise KeyboardInterrupt

    model = seeded()
    optimizer = Raises(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level="O2", init_scale=SCALE, verbosity=0)
    backward(model, optimizer, data(), delay_unscale=True)
    with pytest.raises(KeyboardInterrupt):
        optimizer.zero_grad()
    nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    assert close(grads(optimizer), float_grads(data()))
