"""Do two rows differ by more than chance?  PairedTest t tests over seeds, from scipy.

A seed gives both rows the same initial weights and order of the data, so its effect cancels in
their difference.  p is corrected over the rows by Holm's method: the probability of calling any
equal row different is at most `SIGNIFICANCE_LEVEL`.

docs/explanation/sweep_figures.md has the sources.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from pandas import Series

SIGNIFICANCE_LEVEL = 0.05  # probability of calling any equal row different, for all rows together
CONFIDENCE = 0.95
POWER = 0.8  # the probability with which a test finds `smallest_detectable`
MIN_TEST_SEEDS = 3  # with fewer, rows that equal O0 are seldom shown to be within the margin
RELATIVE_TOLERANCE = 1e-9  # differences whose scatter is less, relative to the values, are constant


@dataclass(frozen=True)
class PairedTest:
    """The mean of the differences, the two-sided `p`, and the confidence interval of the mean.

    `scatter` is the standard deviation of the differences.  If it is 0, p and interval are those of
    an unpaired test; if neither sample scatters, p is 1 for equal numbers and 0 for others.
    """

    difference: float
    scatter: float
    p: float
    low: float
    high: float


def paired_t_test(sample: Sequence[float], base: Sequence[float]) -> PairedTest:
    """Compare `sample` with `base`, two or more finite values each, pair by pair."""
    differences = [value - reference for value, reference in zip(sample, base, strict=True)]
    mean, sd = statistics.fmean(differences), statistics.stdev(differences)
    tolerance = RELATIVE_TOLERANCE * max(map(abs, (*sample, *base)))
    if sd <= tolerance:
        return _constant(sample, base, 0.0 if abs(mean) <= tolerance else mean)
    from scipy.stats import ttest_1samp

    return _run_test(mean, sd, ttest_1samp, differences, 0.0)


def holm(p: Series) -> Series:
    """Correct p values by Holm's method.

    The k-th smallest of m p values is multiplied by m - k + 1, made monotonic, and limited to 1.
    """
    ordered = p.sort_values()
    return (ordered * numpy.arange(len(p), 0, -1)).cummax().clip(upper=1.0)[p.index]


def smallest_detectable(sd: float, n: int, rows: int = 1) -> float:
    """The true difference that a test of `n` differences with this `sd` finds, with `POWER`.

    The test is the first step of Holm's correction over `rows` rows, which has the significance
    level `SIGNIFICANCE_LEVEL` / `rows`.
    """
    from scipy.special import nctdtrinc
    from scipy.stats import t

    threshold = t.isf(SIGNIFICANCE_LEVEL / rows / 2, n - 1)
    # Rejecting on the other side has a probability of nearly 0 there.
    noncentrality = float(nctdtrinc(n - 1, 1 - POWER, threshold))
    return noncentrality * sd / math.sqrt(n)


def _constant(sample: Sequence[float], base: Sequence[float], difference: float) -> PairedTest:
    """The result for a constant difference: that of an unpaired test of the two samples."""
    if not difference or statistics.stdev(base) <= RELATIVE_TOLERANCE * max(map(abs, base)):
        return PairedTest(difference, 0.0, float(not difference), difference, difference)
    from scipy.stats import ttest_ind

    return _run_test(difference, 0.0, ttest_ind, sample, base)


def _run_test(difference: float, sd: float, ttest: Callable[..., Any], *args: Any) -> PairedTest:
    with warnings.catch_warnings():  # nearly equal values are expected here
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
        test = ttest(*args)
    interval = test.confidence_interval(CONFIDENCE)
    return PairedTest(difference, sd, float(test.pvalue), float(interval.low), float(interval.high))
