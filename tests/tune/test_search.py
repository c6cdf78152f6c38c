"""The search finds the smallest set, by few candidates, each once."""

import itertools
import math
import random

import pytest

from ampatch.tune.search import max_trials, smallest_passing_set


def noting(tried, needed):
    """Whether a candidate has what is `needed`; notes each in `tried`."""

    def passes(chosen):
        tried.append(chosen)
        return needed <= chosen

    return passes


@pytest.mark.parametrize("size", (1, 2, 7, 64, 300))
@pytest.mark.parametrize("faults", (1, 2, 3))
def test_what_is_needed_is_found_exactly_wherever_it_stands(size, faults):
    choose = random.Random(size * faults)
    for _ in range(40):
        needed, tried = set(choose.sample(range(size), min(faults, size))), []
        result = smallest_passing_set(range(size), noting(tried, needed), limit=size + 99)
        assert result.passes and result.is_decided
        assert set(result.needed) == needed
        assert len(set(tried)) == len(tried) == result.trials  # none twice


@pytest.mark.parametrize("size", (10, 100, 1000))
def test_likely_remedies_are_found_within_the_default_number(size):
    """Faults among the most sensitive modules: at most about 2 log2(n) candidates."""
    for first, second in itertools.product(range(5), repeat=2):
        needed = {first, second}
        result = smallest_passing_set(range(size), needed.issubset, max_trials(size))
        assert set(result.needed) == needed and result.is_decided
        assert result.trials <= max_trials(size) <= 2 * math.ceil(math.log2(size + 1)) + 8


def test_where_not_even_all_pass_there_is_nothing_needed():
    result = smallest_passing_set(range(16), lambda chosen: False, limit=99)
    assert not result.passes and result.is_decided and result.needed == ()
    assert result.trials == 5  # 1, 2, 4, 8 and 16 in place


def test_where_the_trials_end_the_best_candidate_is_the_answer_and_says_so():
    needed = {40, 90, 95}
    result = smallest_passing_set(range(100), needed.issubset, limit=12)
    assert result.passes and not result.is_decided and result.trials == 12
    assert needed < set(result.needed) and len(result.needed) < 100
    result = smallest_passing_set(range(100), needed.issubset, limit=3)  # none has passed
    assert not result.passes and not result.is_decided
