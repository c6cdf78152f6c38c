"""Models of one process at different opt levels, taking turns: each as in its solo run."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
from torch import nn

import ampatch

FP16, H, FP32 = torch.float16, torch.bfloat16, torch.float32


class Plan(NamedTuple):
    """A model's level (None: unmanaged) and half type."""

    level: str | None
    dtype: torch.dtype


PLANS = (
    Plan("O1", FP16),
    Plan("O1", H),
    Plan("O2", FP16),
    Plan("O3", H),
    Plan("O0", H),
    Plan(None, FP32),
)


class Training:
    """A small network, its optimizer and its data, all from one seed."""

    def __init__(self, seed: int, plan: Plan, scope: str):
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.LayerNorm(8), nn.Softmax(-1), nn.Dropout(0.0), nn.Linear(8, 2)
        )
        self.inputs = torch.randn(6, 4, generator=generator)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.plan = plan
        if plan.level is not None:
            scale = {"loss_scale": 128.0} if plan.level in ("O1", "O2") else {}
            ampatch.initialize(
                self.model,
                self.optimizer,
                opt_level=plan.level,
                dtype=plan.dtype,
                patch_scope=scope,
                verbosity=0,
                **scale,
            )

    def step(self) -> list[torch.Tensor]:
        """One step of training and an evaluation; the outputs and the gradients' sum."""
        self.optimizer.zero_grad()
        output = self.model(self.inputs)
        loss = output.float().pow(2).mean()
        if self.plan.level is None:
            loss.backward()
        else:
            with ampatch.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
        self.optimizer.step()
        with torch.no_grad():
            return [output.detach(), self.model(self.inputs)]


def same(found, expected) -> bool:
    return all(
        a.dtype is b.dtype and torch.equal(a, b)
        for one, other in zip(found, expected, strict=True)
        for a, b in zip(one, other, strict=True)
    )


@functools.cache
def solo(plans, scope) -> list:
    outputs = []
    for seed, plan in enumerate(plans):
        training = Training(seed, plan, scope)
        outputs.append([training.step() for _ in range(4)])
        ampatch.deactivate()
    return outputs


def check(plans, scope, order):
    expected = solo(plans, scope)
    trainings: list = [None] * len(plans)
    for index in order:
        trainings[index] = Training(index, plans[index], scope)
    found: list = [[] for _ in plans]
    for _ in range(4):
        for index in reversed(order):
            found[index].append(trainings[index].step())
    for plan, one, other in zip(plans, found, expected, strict=True):
        assert same(one, other), plan


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (2, 5, 0, 4, 1, 3)])
def test_each_model_is_bit_equal_to_its_solo_run(order):
    """All levels, both half types and an unmanaged model; casting inside the models only."""
    check(PLANS, "model", order)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_under_process_scope_managed_models_are_too(order):
    """One O1 session, since losses outside forwards follow the session opened last."""
    check((PLANS[0], *PLANS[2:5]), "process", order)


@pytest.mark.parametrize("closed", range(5))
def test_closing_one_leaves_the_others(closed):
    expected = solo(PLANS, "model")
    trainings = [Training(seed, plan, "model") for seed, plan in enumerate(PLANS)]
    found = [[training.step(), training.step()] for training in trainings]
    model = trainings[closed].model
    session = ampatch.session.session.registry.table.session_of(model)
    session.close()
    for index, training in enumerate(trainings):
        if index != closed:
            found[index] += [training.step(), training.step()]
            assert same(found[index], expected[index]), PLANS[index]
    with torch.no_grad():
        assert model(trainings[closed].inputs).dtype is FP32


def test_one_model_inside_another():
    """A frozen O0 teacher, called inside an O1 student's forward, computes as by itself."""

    class Student(nn.Module):
        def __init__(self, teacher):
            super().__init__()
            self.teachers, self.layer = [teacher], nn.Linear(4, 2)  # in a list: not its submodule

        def forward(self, x):
            return self.layer(x), self.teachers[0](x), self.layer(x)

    x = torch.randn(3, 4)
    for level, dtype in (("O0", FP32), ("O2", FP32), ("O3", FP32), ("O1", FP16)):
        teacher = ampatch.initialize(
            nn.Linear(4, 2), opt_level=level, dtype=FP16, patch_scope="model", verbosity=0
        )
        alone = teacher(x)
        student = ampatch.initialize(Student(teacher), dtype=H, patch_scope="model", verbosity=0)
        before, taught, after = student(x)
        assert before.dtype is after.dtype is H and torch.equal(before, after)
        assert taught.dtype is dtype and torch.equal(taught, alone)
        ampatch.deactivate()
