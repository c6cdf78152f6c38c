"""Random training programs, under ampatch and under its oracle, bit by bit."""

import itertools

import pytest
import torch
from drivers import ByHand, differ
from programs import ACTIONS, program, replay, results
from situations import HALVES, LEVELS

COUNT, MANY = 25, 500
CELLS = [*itertools.product(("O1", "O2"), HALVES), ("O3", "bf16")]  # O3 scales in neither type


@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize(("level", "half"), CELLS)
def test_program(level, half, seed):
    replay(level, half, program(seed))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(COUNT, MANY, 25))
@pytest.mark.parametrize(("level", "half"), CELLS)
def test_many_programs(level, half, first):
    for seed in range(first, first + 25):
        replay(level, half, program(seed, length=50))


def test_there_are_forty_actions_and_the_default_run_has_them_all():
    used = {name for seed in range(COUNT) for name, _ in program(seed)}
    assert len(ACTIONS) >= 40 and used >= set(ACTIONS), set(ACTIONS) - used


@pytest.mark.parametrize("level", LEVELS)
def test_the_oracle_trains(level):
    """Programs move weights, and do not run away."""
    for seed in range(5):
        oracle = ByHand(level, torch.bfloat16)
        actual = results(oracle, program(seed))
        final, start = oracle.weights(), ByHand(level, torch.bfloat16)
        assert all(value.isfinite().all() for value in actual)
        results(start, [("sgd", 0)])
        assert any(differ(a, b).any() for a, b in zip(final, start.weights()))
