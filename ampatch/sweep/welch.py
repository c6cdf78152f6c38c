"""Whether two small samples differ by more than their scatter: Welch's t test.

B. L. Welch, "The generalization of 'Student's' problem when several different
population variances are involved", Biometrika 34 (1947), 28-35.  The samples
may scatter differently, as a half type and FP32 may.  Student's distribution
is computed by the incomplete beta function's continued fraction (NIST Digital
Library of Mathematical Functions, 8.17.22), so that no scipy is needed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Welch:
    """`difference` of the means, its confidence interval, the two-sided `p`.

    `pooled_sds` is the difference in pooled standard deviations (Cohen's d);
    infinite where neither sample scatters and they differ.
    """

    difference: float
    p: float
    low: float
    high: float
    pooled_sds: float


def welch(sample: Sequence[float], base: Sequence[float]) -> Welch:
    """Compare `sample` with `base`, each of two or more finite values."""
    difference = statistics.fmean(sample) - statistics.fmean(base)
    ours, theirs = (statistics.variance(values) / len(values) for values in (sample, base))
    error = math.sqrt(ours + theirs)
    if error == 0:
        away = math.copysign(math.inf, difference) if difference else 0.0
        return Welch(difference, float(difference == 0), difference, difference, away)
    freedom = (ours + theirs) ** 2 / (ours**2 / (len(sample) - 1) + theirs**2 / (len(base) - 1))
    half = student_quantile(1 - (1 - CONFIDENCE) / 2, freedom) * error
    return Welch(
        difference,
        two_sided_p(difference / error, freedom),
        difference - half,
        difference + half,
        difference / pooled_sd(sample, base),
    )


def pooled_sd(sample: Sequence[float], base: Sequence[float]) -> float:
    """The standard deviation of both, each around its own mean."""
    squares = sum(statistics.variance(values) * (len(values) - 1) for values in (sample, base))
    return math.sqrt(squares / (len(sample) + len(base) - 2))


def two_sided_p(t: float, freedom: float) -> float:
    """The probability of a Student-distributed value at least as far from 0 as `t`."""
    return _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def student_quantile(probability: float, freedom: float) -> float:
    """The value that a Student-distributed one stays below with `probability`, above 0.5."""
    low, high = 0.0, 1.0
    while 1 - two_sided_p(high, freedom) / 2 < probability:
        low, high = high, high * 2
    for _ in range(80):
        middle = (low + high) / 2
        if 1 - two_sided_p(middle, freedom) / 2 < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - _incomplete_beta(1 - x, b, a)
    log_front = a * math.log(x) + b * math.log1p(-x) - math.log(a)
    log_front += math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(log_front) / _continued_fraction(x, a, b)


def _continued_fraction(x: float, a: float, b: float) -> float:
    """1 + d1 x / (1 + d2 x / (1 + ...)), from the inside out."""
    value = 1.0
    for index in range(200, 0, -1):
        m, odd = divmod(index, 2)
        if odd:
            factor = -(a + m) * (a + b + m) / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            factor = m * (b - m) / ((a + 2 * m - 1) * (a + 2 * m))
        value = 1 + factor * x / value
    return value
