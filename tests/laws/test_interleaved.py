"""Models of one process at different opt levels, taking turns: each as in its solo run."""

import functools

import pytest
import torch
from small_training import step
from torch import nn

import ampatch
from ampatch.session.facade import session_of

FP16, H, FP32 = torch.float16, torch.bfloat16, torch.float32
PLANS = (("O1", FP16), ("O1", H), ("O2", FP16), ("O3", H), ("O0", H), (None, FP32))
"""A level (None: unmanaged) and a half dtype for each model."""


class Training:
    def __init__(self, seed, plan, scope):
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.LayerNorm(8), nn.Softmax(-1), nn.Dropout(0.0), nn.Linear(8, 2)
        )
        self.inputs = torch.randn(6, 4)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.level, dtype = plan
        if self.level is not None:
            settings = {"loss_scale": 128.0} if self.level in ("O1", "O2") else {}
            settings |= {"dtype": dtype, "patch_scope": scope, "verbosity": 0}
            ampatch.initialize(self.model, self.optimizer, opt_level=self.level, **settings)

    def step(self):
        """The outputs of a step of training and of an evaluation."""
        output = self.model(self.inputs)
        loss = output.float().pow(2).mean()
        if self.level is None:
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        else:
            step(loss, self.optimizer)
        with torch.no_grad():
            return [output.detach(), self.model(self.inputs)]


def same(actual, expected):
    return all(
        a.dtype is b.dtype and torch.equal(a, b)
        for ours, other in zip(actual, expected, strict=True)
        for a, b in zip(ours, other, strict=True)
    )


@functools.cache
def solo(plans, scope):
    outputs = []
    for seed, plan in enumerate(plans):
        training = Training(seed, plan, scope)
        outputs.append([training.step() for _ in range(4)])
        ampatch.deactivate()
    return outputs


@pytest.mark.parametrize(
    "scope, order",
    [
        ("model", (0, 1, 2, 3, 4, 5)),
        ("model", (5, 4, 3, 2, 1, 0)),
        ("model", (2, 5, 0, 4, 1, 3)),
        ("process", (0, 1, 2, 3)),
        ("process", (3, 2, 1, 0)),
    ],
    ids=str,
)
def test_each_model_is_bit_equal_to_its_solo_run(scope, order):
    """All levels, both half dtypes, an unmanaged model.  Of a process one session is at O1, since
    losses outside forwards follow the session opened last."""
    plans = PLANS if scope == "model" else (PLANS[0], *PLANS[2:5])
    expected = solo(plans, scope)
    trainings = {index: Training(index, plans[index], scope) for index in order}
    actual = [[] for _ in plans]
    for _ in range(4):
        for index in reversed(order):
            actual[index].append(trainings[index].step())
    for plan, first, other in zip(plans, actual, expected, strict=True):
        assert same(first, other), plan


@pytest.mark.parametrize("closed", range(5))
def test_closing_one_leaves_the_others(closed):
    expected = solo(PLANS, "model")
    trainings = [Training(seed, plan, "model") for seed, plan in enumerate(PLANS)]
    actual = [[training.step(), training.step()] for training in trainings]
    model = trainings[closed].model
    session_of(model).close()
    for index, training in enumerate(trainings):
        if index != closed:
            actual[index] += [training.step(), training.step()]
            assert same(actual[index], expected[index]), PLANS[index]
    with torch.no_grad():
        assert model(trainings[closed].inputs).dtype is FP32
