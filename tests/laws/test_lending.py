"""Lent weights, behind their switch: at O2 a weight is FP32, and forwards have half copies.

All situations and programs of O2 hold against an oracle that does this with torch's own means.
"""

from __future__ import annotations

import dataclasses

import pytest
from programs import program, replay
from situations import HALVES
from test_random_programs import COUNT
from test_situations import ROWS, check

from ampatch.config import opt_levels

ALLOWED_NOW = {
    "an_optimizer_made_after_initialize_at_o2": "it steps on FP32 weights",
    "float_after_initialize": "the weights are FP32",
    "to_a_dtype_after_initialize": "to FP32, which the weights are",
}
"""Situations that are refused where the model holds half weights, and why they no longer are."""


@pytest.fixture(autouse=True)
def lending(monkeypatch):
    monkeypatch.setitem(opt_levels.LENDING, 0, True)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("row", "level", "half"), [r for r in ROWS if r.values[1] == "O2"])
def test_situation(row, level, half, caplog):
    if row.name in ALLOWED_NOW:
        trains = row.name.startswith("an_optimizer")
        row = dataclasses.replace(row, refuses="", changes_weights=trains)
    check(row, level, half, caplog)


@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize("half", HALVES)
def test_program(half, seed):
    replay("O2", half, program(seed))
