"""Models that call each other, and parts of each other; what trains: laws/situations_calls.py."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from small_training import Made, data, in_threads
from torch import nn

import ampatch

HALF = torch.bfloat16
LEVELS = ["O1", "O2", "O3"]


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def initialize(model, level, **settings):
    ampatch.initialize(model, opt_level=level, **{"dtype": HALF, "verbosity": 0, **settings})


@pytest.mark.parametrize("level, inner", [("O1", "O0"), *itertools.product(LEVELS, LEVELS)])
def test_a_teacher_of_another_level_and_half_type(level, inner):
    """In its student's forward it computes as by itself; what it gives fits there."""
    teacher, x = net(1), data()[0].to(HALF).float()

    def forward(self, x):
        taught = teacher(x)
        return self.head(self.body(x) + taught), taught

    student = Made(forward, body=net(), head=net(2))
    expected = student(x)[0]
    initialize(student, level)
    initialize(teacher, inner, dtype=torch.float16)
    out, taught = student(x)
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)
    alone, rounding = teacher(x), 0 if level == "O1" else 0.01
    torch.testing.assert_close(taught.float(), alone.float(), rtol=rounding, atol=rounding)
    assert out.dtype is (HALF if level == "O1" else torch.float32)
    assert alone.dtype is (torch.float16 if inner == "O1" else torch.float32)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_part_of_another_model(level):
    """`teacher.encoder(x)` in the forward of a model that does not have it."""
    teacher = net(1)
    student = Made(lambda self, x: self.head(teacher[0](x)), head=nn.Linear(8, 2))
    initialize([student, teacher], level)
    assert student(data()[0]).dtype is torch.float32
    outside = torch.float32 if level == "O2" else HALF
    assert teacher[0](data()[0]).dtype is outside


@pytest.mark.parametrize("level", LEVELS)
def test_a_float_part_that_calls_a_managed_model(level):
    teacher = net(1)
    student = Made(lambda self, x: self.body(x), body=Made(lambda self, x: self.lin(teacher(x))))
    student.body.lin = nn.Linear(4, 2)
    initialize(student, level, overrides={"body": "float"})
    initialize(teacher, level)
    assert student(data()[0]).isfinite().all()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_shallow_copy_of_a_part_computes(level):
    model = net()
    x = data(0)[0]
    expected = model[0](x)
    initialize(model, level)
    torch.testing.assert_close(copy.copy(model[0])(x).float(), expected, atol=0.05, rtol=0.05)
    assert model[0](x).dtype is (HALF if level == "O1" else torch.float32)


def test_an_override_around_a_managed_model_holds_in_it():
    inner, seen = net(), []
    outer = nn.Sequential(inner, nn.Linear(4, 2))
    initialize(inner, "O2")
    initialize(outer, "O2", overrides={"0": "float"})
    inner[2].register_forward_hook(lambda part, args, out: seen.append(part.weight.dtype))
    outer(data()[0])
    assert seen == [torch.float32]


def test_threads_may_call_a_model_whose_layers_another_one_has_lent():
    """It lends none then, and is free again all the same."""
    body, x = net(), data()[0]
    other = nn.Sequential(*body)
    model = Made(lambda self, x: other(x), body=body)
    initialize([model, other], "O2")
    expected = model(x)
    (found,) = in_threads(lambda: [other(x) for _ in range(2)])
    assert all(torch.equal(one, expected) for one in found)
