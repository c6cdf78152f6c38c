"""Without loss scaling and without master weights training stalls, where the arithmetic says so."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest
import torch
from repository import BENCHMARKS

sys.path.append(str(BENCHMARKS))

import constructed as parts

GRADIENTS = parts.SMALL_GRADIENTS
UPDATES = replace(parts.SMALL_UPDATES, steps=100)
SPACING = {"float16": 2.0**-6, "bfloat16": 2.0**-3}  # of the numbers from 16 to 32


def test_fp32_follows_the_formula():
    assert parts.train(GRADIENTS, "O0") == GRADIENTS.exact(8) == 1 - 2**-8
    assert parts.train(UPDATES, "O0") == pytest.approx(UPDATES.exact(100), abs=1e-5)
    assert UPDATES.exact(100) > 16.5, "or too little happens for a stall to show"


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("scale", [1.0, 2.0, 8.0])
def test_small_gradients_vanish_where_the_formula_says(level, scale):
    """2**-23, halved at each step, reaches 2**-25 after 2; a scale of 2**n lasts n steps longer."""
    trained = parts.train(GRADIENTS, level, loss_scale=scale)
    assert trained == parts.float16_stall(GRADIENTS, scale) == 1 - 2 ** -(2 + math.log2(scale))
    assert trained < GRADIENTS.exact(8)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("scale", [128.0, "dynamic"])
def test_with_loss_scaling_the_result_of_o0_returns(level, scale):
    trained = parts.train(GRADIENTS, level, loss_scale=scale)
    assert trained == parts.train(GRADIENTS, "O0") == GRADIENTS.exact(8)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_levels_scale_without_being_told(level):
    assert parts.train(GRADIENTS, level) == GRADIENTS.exact(8)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_bfloat16_has_the_range_of_fp32_and_needs_no_scaling(level):
    assert parts.train(GRADIENTS, level, "bfloat16", loss_scale=1.0) == GRADIENTS.exact(8)


def test_autocast_stalls_and_returns_at_the_same_places():
    assert parts.train_by_autocast(GRADIENTS, scaling=False) == parts.float16_stall(GRADIENTS)
    assert parts.train_by_autocast(GRADIENTS, scaling=True) == GRADIENTS.exact(8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_small_updates_vanish_without_master_weights(level, dtype):
    """An update of 2**-7 at most is half of float16's spacing or less: the sum rounds back."""
    trained = parts.train(UPDATES, level, dtype, master_weights=False, loss_scale=1.0)
    assert trained == UPDATES.start


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_with_fp32_weights_the_result_of_o0_returns(level, dtype):
    """But for what the forward sees: the weight rounded to half, off by half a spacing at most.

    An error e of the weight becomes (1 - a) * e + a * rounding at each step, so
    it never exceeds the largest rounding.
    """
    trained = parts.train(UPDATES, level, dtype, loss_scale=1.0)
    assert trained == pytest.approx(parts.train(UPDATES, "O0"), abs=SPACING[dtype] / 2)
    assert trained == pytest.approx(UPDATES.exact(100), abs=SPACING[dtype] / 2)


def test_larger_updates_survive_without_masters():
    """It is the ratio of weight to update that counts: 2**-5 is two spacings, and moves."""
    larger = replace(UPDATES, lr=2.0**-6, steps=1)
    trained = parts.train(larger, "O3", loss_scale=1.0)
    assert trained == larger.exact(1) == 16 + 2**-5


def test_adams_eps_is_zero_in_float16():
    """0.001 * gradient**2 underflows below 5.5e-3, and then nothing is left to divide by."""
    assert torch.tensor(1e-8, dtype=torch.float16) == 0
    assert math.isnan(parts.first_adam_step(0.0, 1e-8, torch.float16))
    assert math.isinf(parts.first_adam_step(1e-3, 1e-8, torch.float16))
    assert parts.first_adam_step(1e-2, 1e-8, torch.float16) == pytest.approx(1, rel=0.1)
    for dtype in (torch.float32, torch.bfloat16):
        assert parts.first_adam_step(0.0, 1e-8, dtype) == 0
        assert parts.first_adam_step(1e-3, 1e-8, dtype) == pytest.approx(1, rel=1e-2)


def test_a_larger_eps_keeps_adam_finite_in_float16():
    """The square is gone all the same, so a small gradient is divided by eps alone."""
    assert parts.first_adam_step(0.0, 1e-3, torch.float16) == 0
    assert parts.first_adam_step(1e-3, 1e-3, torch.float16) == pytest.approx(1, rel=1e-2)
    assert parts.first_adam_step(1e-3, 1e-4, torch.float16) == pytest.approx(10, rel=1e-2)


def test_the_tables_have_a_line_for_each_setting():
    scaling, masters = parts.tables()
    assert scaling.count("\n") == len(parts.LOSS_SCALING) + 3
    assert "| O1 float16, loss_scale=1 | 0.750000 |" in scaling
    assert masters.count("\n") == len(parts.MASTER_WEIGHTS) + 3
    assert "| O3 bfloat16 | 16.000000 |" in masters
