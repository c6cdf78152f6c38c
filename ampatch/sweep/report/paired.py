"""Do two rows differ by more than chance?  Paired t tests over seeds, from scipy.

A seed gives both rows the same first weights and the same order of the data, so what the seed does
to both cancels in their difference.  p is corrected over the rows by Holm's method, so the chance
to call any row different that is not is at most `LEVEL`.

docs/explanation/sweep_figures.md has the sources.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.05  # significance level, for all rows together
CONFIDENCE = 0.95
POWER = 0.8
SAME = 1e-9  # differences whose scatter is below this part of the values are one number
MISSING = (
    "Accuracy is not tested: scipy is not installed. pip install scipy, or pip install "
    '"ampatch[sweep]"; then --resume tests what has run.'
)


@dataclass(frozen=True)
class Paired:
    """The mean of the differences, the two-sided `p`, and the confidence interval of the mean.

    `sd` is the standard deviation of the differences.  Where it is 0, p and interval are those of
    the samples taken as unpaired, or, where neither scatters, of two different numbers: p is 0.
    """

    difference: float
    sd: float
    p: float
    low: float
    high: float


def available() -> bool:
    """Whether scipy is installed."""
    return importlib.util.find_spec("scipy") is not None


def paired(sample: Sequence[float], base: Sequence[float]) -> Paired:
    """Compare `sample` with `base`, two or more finite values each, pair by pair.  Needs scipy."""
    differences = [value - reference for value, reference in zip(sample, base, strict=True)]
    mean, sd = statistics.fmean(differences), statistics.stdev(differences)
    nothing = SAME * max(map(abs, (*sample, *base)))
    if sd <= nothing:
        return _same_with_each(sample, base, 0.0 if abs(mean) <= nothing else mean)
    from scipy.stats import ttest_1samp

    with warnings.catch_warnings():  # of nearly equal values, which are as they are
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
        tested = ttest_1samp(differences, 0.0)
    interval = tested.confidence_interval(CONFIDENCE)
    return Paired(mean, sd, float(tested.pvalue), float(interval.low), float(interval.high))


def holm(p: Sequence[float]) -> list[float]:
    """The corrected p, in the order of `p`: the k-th smallest of m times m-k+1, never falling."""
    corrected, least = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        least = max(least, min(1.0, p[index] * (len(p) - rank)))
        corrected[index] = least
    return corrected


def smallest_seen(sd: float, n: int, rows: int = 1) -> float:
    """The true difference that a test of `n` differences finds with probability `POWER`.

    `sd` is theirs.  It is found whatever the other of `rows` rows are: at `LEVEL` / `rows`, the
    first and hardest step of Holm's correction.  Needs scipy.
    """
    from scipy.special import nctdtrinc
    from scipy.stats import t

    threshold = t.isf(LEVEL / rows / 2, n - 1)
    # Rejecting on the other side has a probability of nearly 0 there.
    noncentrality = float(nctdtrinc(n - 1, 1 - POWER, threshold))
    return noncentrality * sd / math.sqrt(n)


def _same_with_each(sample: Sequence[float], base: Sequence[float], difference: float) -> Paired:
    """The result for differences that are one number.

    It is due to chance as likely as a step of that size between two samples like these.
    """
    if not difference or statistics.stdev(base) <= SAME * max(map(abs, base)):
        return Paired(difference, 0.0, float(not difference), difference, difference)
    from scipy.stats import ttest_ind

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
        tested = ttest_ind(sample, base)
    interval = tested.confidence_interval(CONFIDENCE)
    return Paired(difference, 0.0, float(tested.pvalue), float(interval.low), float(interval.high))
