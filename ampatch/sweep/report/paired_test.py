"""Do two rows differ by more than chance?  Paired t tests over seeds, from scipy.

A seed gives both rows the same initial weights and order of the data, so its effect cancels in
their difference.  p is corrected over the rows by Holm's method: the probability of calling any
equal row different is at most `LEVEL`.

docs/explanation/sweep_figures.md has the sources.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from pandas import Series

LEVEL = 0.05  # significance level, for all rows together
CONFIDENCE = 0.95
POWER = 0.8
TESTED = 3  # seeds that a test needs: 93 % of equal rows then pass, with two 37 % (simulated)
SAME = 1e-9  # relative to the values: differences with less scatter count as constant


@dataclass(frozen=True)
class Paired:
    """The mean of the differences, the two-sided `p`, and the confidence interval of the mean.

    `sd` is the standard deviation of the differences.  If it is 0, p and interval are those of an
    unpaired test; if neither sample scatters, p is 1 for equal numbers and 0 for others.
    """

    difference: float
    sd: float
    p: float
    low: float
    high: float


def paired(sample: Sequence[float], base: Sequence[float]) -> Paired:
    """Compare `sample` with `base`, two or more finite values each, pair by pair."""
    differences = [value - reference for value, reference in zip(sample, base, strict=True)]
    mean, sd = statistics.fmean(differences), statistics.stdev(differences)
    tolerance = SAME * max(map(abs, (*sample, *base)))
    if sd <= tolerance:
        return _constant(sample, base, 0.0 if abs(mean) <= tolerance else mean)
    from scipy.stats import ttest_1samp

    with warnings.catch_warnings():  # of nearly equal values, which are expected here
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
        tested = ttest_1samp(differences, 0.0)
    interval = tested.confidence_interval(CONFIDENCE)
    return Paired(mean, sd, float(tested.pvalue), float(interval.low), float(interval.high))


def holm(p: Series) -> Series:
    """The corrected p: the k-th smallest of m times m-k+1, never falling, and 1 at most."""
    ordered = p.sort_values()
    return (ordered * numpy.arange(len(p), 0, -1)).cummax().clip(upper=1.0)[p.index]


def smallest_detectable(sd: float, n: int, rows: int = 1) -> float:
    """The true difference that a test of `n` differences with this `sd` finds, with `POWER`.

    The level is that of the first step of Holm's correction over `rows` rows, `LEVEL` / `rows`.
    """
    from scipy.special import nctdtrinc
    from scipy.stats import t

    threshold = t.isf(LEVEL / rows / 2, n - 1)
    # Rejecting on the other side has a probability of nearly 0 there.
    noncentrality = float(nctdtrinc(n - 1, 1 - POWER, threshold))
    return noncentrality * sd / math.sqrt(n)


def _constant(sample: Sequence[float], base: Sequence[float], difference: float) -> Paired:
    """The result for a constant difference: that of an unpaired test of the two samples."""
    if not difference or statistics.stdev(base) <= SAME * max(map(abs, base)):
        return Paired(difference, 0.0, float(not difference), difference, difference)
    from scipy.stats import ttest_ind

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
        tested = ttest_ind(sample, base)
    interval = tested.confidence_interval(CONFIDENCE)
    return Paired(difference, 0.0, float(tested.pvalue), float(interval.low), float(interval.high))
