"""Random trainings with random faults: inf and NaN anywhere, at any time.

Each example is a small program over one or two optimizers and up to three
losses: accumulate (also delayed), inject, clip, step, set the scale, be
interrupted.  After every operation the laws hold that a script may rely on, and
which steps are skipped and where the scale goes is foretold by a model of a few
lines.
"""

import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from small_training import data, everything, pass_back, same, seeded

import ampatch

FLOOR, CAP = 2.0**-6, 2.0**12
GROWTH_INTERVAL = 3
BAD = st.sampled_from([math.inf, -math.inf, math.nan])
KINDS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, foreach=True),
}


class Example:
    """The training, and what is known of it without looking: `dirty`, `scales`, `clean`."""

    def __init__(self, level, kinds, losses):
        self.models = [seeded(number) for number in range(len(kinds))]
        self.optimizers = [
            KINDS[kind](model.parameters()) for kind, model in zip(kinds, self.models, strict=True)
        ]
        ampatch.initialize(
            self.models,
            self.optimizers,
            opt_level=level,
            num_losses=losses,
            loss_scale="dynamic",
            init_scale=256.0,
            growth_interval=GROWTH_INTERVAL,
            min_loss_scale=FLOOR,
            max_loss_scale=CAP,
            verbosity=0,
        )
        self.losses = losses
        self.dirty = [False] * len(kinds)  # gradients hold inf or NaN
        self.counts = [(0, 0)] * len(kinds)
        self.scales = [(256.0, 0)] * losses  # the scale, and clean steps since it moved

    def loss(self, fed, factor=1.0):
        inputs, targets = data(5)
        outputs = [self.models[index](inputs).float() for index in fed]
        return sum(F.mse_loss(output, targets) * factor for output in outputs)

    def backward(self, fed, loss_id, bad, through, where, delayed):
        """One block; `bad` goes into the loss, into a gradient on its way, or into one at rest.

        `delayed`: the block leaves its gradients scaled, and a healthy one comes after it.
        Then all gradients are unscaled together, and an old fault among them counts anew.
        """
        victim = fed[where % len(fed)]
        parameters = list(self.models[victim].parameters())
        parameter = parameters[where % len(parameters)]
        handle = None
        if bad is not None and through == "hook":
            handle = parameter.register_hook(lambda grad: poisoned(grad, where, bad))
        factor = bad if bad is not None and through == "loss" else 0.05
        optimizers = [self.optimizers[index] for index in fed]
        loss = self.loss(fed, factor)
        with ampatch.scale_loss(loss, optimizers, loss_id, delay_unscale=delayed) as scaled:
            scaled.backward()
            if bad is not None and through == "grad":
                parameter.grad.copy_(poisoned(parameter.grad, where, bad))
        if handle is not None:
            handle.remove()
        faulty = bad is not None or (delayed and any(self.dirty[index] for index in fed))
        if bad is not None:
            for index in fed if through == "loss" else [victim]:
                self.dirty[index] = True
        if delayed:
            pass_back(self.loss(fed, 0.05), optimizers, loss_id)
        self.scales[loss_id] = ruled(*self.scales[loss_id], faulty)

    def interrupt(self, fed, loss_id, bad):
        """A backward pass that is stopped: as if it had never been."""
        optimizers = [self.optimizers[index] for index in fed]
        before = [gradients(optimizer) for optimizer in self.optimizers]
        with pytest.raises(KeyboardInterrupt):
            with ampatch.scale_loss(self.loss(fed, bad), optimizers, loss_id) as scaled:
                scaled.backward()
                raise KeyboardInterrupt
        assert all(map(same_gradients, before, map(gradients, self.optimizers)))

    def step(self, index):
        optimizer, model = self.optimizers[index], self.models[index]
        had = any(grad is not None and grad.any() for grad in gradients(optimizer))
        before = everything(model, optimizer)
        optimizer.step()
        after = everything(model, optimizer)
        skipped = self.dirty[index]
        assert ampatch.step_was_skipped(optimizer) is skipped
        if skipped:
            assert same(before, after[: len(before)])
            assert all(not tensor.any() for tensor in after[len(before) :])  # state just made
        elif had:
            assert not same(before, after)
        steps = {int(s["step"]) for s in optimizer.state.values() if "step" in s}
        assert len(steps) <= 1, "half updated"
        steps_taken, left_out = self.counts[index]
        self.counts[index] = (steps_taken + (not skipped), left_out + skipped)
        assert tuple(ampatch.step_counts(optimizer)[:2]) == self.counts[index]

    def zero(self, index, how):
        if how == "by hand":
            for param in ampatch.master_params(self.optimizers[index]):
                param.grad = None
        elif how == "model":
            self.models[index].zero_grad()
        else:
            self.optimizers[index].zero_grad(set_to_none=how == "none")
        self.dirty[index] = False

    def clip(self, index, by_master):
        optimizer, model = self.optimizers[index], self.models[index]
        of = ampatch.master_params(optimizer) if by_master else model.parameters()
        norm = torch.nn.utils.clip_grad_norm_(of, 1e-3)
        assert bool(norm.isfinite()) is not self.dirty[index]

    def check(self):
        """What holds at any time."""
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            assert all(tensor.isfinite().all() for tensor in everything(model, optimizer))
        for loss_id, (scale, _) in enumerate(self.scales):
            assert FLOOR <= ampatch.loss_scale(loss_id) <= CAP
            assert ampatch.loss_scale(loss_id) == scale


def ruled(scale, clean, bad):
    if bad:
        return max(scale / 2, FLOOR), 0
    if clean + 1 == GROWTH_INTERVAL:
        return min(scale * 2, CAP), 0
    return scale, clean + 1


def poisoned(grad, where, bad):
    grad = grad.clone()
    grad.view(-1)[where % grad.numel()] = bad
    return grad


def gradients(optimizer):
    return [None if p.grad is None else p.grad.clone() for p in ampatch.master_params(optimizer)]


def same_gradients(first, second):
    return all(
        a is b is None or torch.equal(a.nan_to_num(1.5), b.nan_to_num(1.5))
        for a, b in zip(first, second, strict=True)
    )


def operations(optimizers, losses):
    index = st.integers(0, optimizers - 1)
    fed = st.lists(index, min_size=1, max_size=optimizers, unique=True)
    loss_id = st.integers(0, losses - 1)
    maybe_bad = st.one_of(st.none(), st.none(), BAD)
    through, where = st.sampled_from(["loss", "hook", "grad"]), st.integers(0, 50)
    backward = st.tuples(
        st.just("backward"), fed, loss_id, maybe_bad, through, where, st.booleans()
    )
    zero = st.tuples(st.just("zero"), index, st.sampled_from(["none", "zeros", "model", "by hand"]))
    return st.one_of(
        backward,
        backward,
        st.tuples(st.just("step"), index),
        st.tuples(st.just("step"), index),
        zero,
        st.tuples(st.just("interrupt"), fed, loss_id, st.just(1.0) | BAD),
        st.tuples(st.just("clip"), index, st.booleans()),
    )


@st.composite
def programs(draw):
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=2))
    losses = draw(st.integers(1, 3))
    steps = draw(st.lists(operations(len(kinds), losses), min_size=4, max_size=14))
    return draw(st.sampled_from(["O1", "O2"])), kinds, losses, steps


@hypothesis.settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[hypothesis.Phase.generate],  # shrinking whole trainings would take minutes
)
@hypothesis.given(program=programs())
def test_whatever_is_injected(program):
    level, kinds, losses, steps = program
    try:
        example = Example(level, kinds, losses)
        for name, *arguments in steps:
            getattr(example, name)(*arguments)
            example.check()
    finally:
        ampatch.deactivate()
