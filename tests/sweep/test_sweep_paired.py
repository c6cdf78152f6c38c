"""Paired tests over seeds: p, intervals, Holm's correction and power, against formulas."""

import math
import random
import statistics

import pandas
import pytest

from ampatch.sweep.report.paired_test import LEVEL, POWER, holm, paired, smallest_detectable


def within(t, freedom, parts=4000):
    """The probability of a Student-distributed value between -t and t, by Simpson's rule."""

    def density(x):
        return (1 + x * x / freedom) ** (-(freedom + 1) / 2)

    front = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    front /= math.sqrt(freedom * math.pi)
    width = t / parts
    inner = sum((4 if n % 2 else 2) * density(n * width) for n in range(1, parts))
    return 2 * front * width / 3 * (density(0) + inner + density(t))


def test_the_test_is_students_integral_of_the_differences():
    chance = random.Random(0)
    for _ in range(30):
        n = chance.randint(2, 9)
        base = [chance.gauss(0, 5) for _ in range(n)]
        ours = [value + chance.gauss(0.5, 1) for value in base]
        differences = [a - b for a, b in zip(ours, base)]
        error = statistics.stdev(differences) / math.sqrt(n)
        test = paired(ours, base)
        assert test.difference == pytest.approx(statistics.mean(differences))
        assert test.p == pytest.approx(1 - within(abs(test.difference) / error, n - 1), abs=1e-9)
        assert within((test.high - test.difference) / error, n - 1) == pytest.approx(0.95)
        assert test.high - test.difference == pytest.approx(test.difference - test.low)


def test_one_number_as_each_difference_is_compared_as_unpaired():
    """Means 2 and 5, variances 1 and 1, n = 3: t = 3 / sqrt(2/3) with 4 degrees of freedom.

    p and the quantile 2.776 are those of the tables; four degrees have a closed form.
    """
    test = paired([1, 2, 3], [4, 5, 6])
    t = 3 / (2 / 3) ** 0.5
    x = t / (4 + t * t) ** 0.5
    assert test.p == pytest.approx(1 - x * (3 - x * x) / 2)
    assert test.high - test.low == pytest.approx(2 * 2.7764451 * (2 / 3) ** 0.5)
    assert test.sd == 0
    almost = paired([0.51, 0.71], [0.5, 0.7])  # one number but for its last digit
    assert almost.p > 0.9 and almost.sd == 0


@pytest.mark.parametrize(
    ("ours", "base", "p"),
    [([0.5, 0.7], [0.5, 0.7], 1.0), ([0.1, 0.1], [0.1, 0.1], 1.0), ([0.1, 0.1], [0.9, 0.9], 0.0)],
)
def test_samples_without_scatter_differ_or_do_not(ours, base, p):
    assert paired(ours, base).p == p


def test_holm_by_hand():
    """The smallest of four times 4, the next times 3, ...; never below one before it."""
    for p, corrected in (
        ([0.04, 0.01, 0.03, 0.5], [0.09, 0.04, 0.09, 0.5]),
        ([0.9, 0.8], [1.0, 1.0]),
        ([], []),
    ):
        assert list(holm(pandas.Series(p, dtype=float))) == pytest.approx(corrected)


@pytest.mark.parametrize(("n", "rows"), [(2, 1), (3, 1), (3, 9), (8, 3)])
def test_the_smallest_difference_is_found_with_the_power_it_claims(n, rows):
    """Of many samples with that mean so many are significant, at the level of one of the rows."""
    numpy, stats = pytest.importorskip("numpy"), pytest.importorskip("scipy.stats")
    scatter, samples = 0.3, 4000
    draws = numpy.random.default_rng(0).normal(
        smallest_detectable(scatter, n, rows), scatter, (samples, n)
    )
    error = draws.std(axis=1, ddof=1) / math.sqrt(n)
    t = numpy.abs(draws.mean(axis=1)) / error
    share = (t > stats.t.ppf(1 - LEVEL / rows / 2, n - 1)).mean()
    assert share == pytest.approx(POWER, abs=4 * math.sqrt(POWER * (1 - POWER) / samples))
