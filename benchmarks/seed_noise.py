"""Is a difference of means within the noise of the seeds?  Welch's t-test.

B. L. Welch, "The generalization of Student's problem when several different
population variances are involved", Biometrika 34 (1947), 28-35; degrees of
freedom after Satterthwaite (1946).  Two-sided, at the 5 % level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import mean, variance

from scipy.stats import t as student

LEVEL = 0.05


@dataclass(frozen=True)
class Comparison:
    """Mean of a sample less the reference's, its 95 % interval, and the p-value."""

    difference: float
    low: float
    high: float
    p: float

    @property
    def within_noise(self) -> bool:
        """Whether equal means would give such a difference in 5 % of cases or more."""
        return self.p >= LEVEL


def welch(sample: list[float], reference: list[float]) -> Comparison:
    """Compare two samples, each of two values or more, all finite.

    Samples without any variance differ for certain or not at all.
    """
    difference = mean(sample) - mean(reference)
    parts = [variance(values) / len(values) for values in (sample, reference)]
    error = math.sqrt(sum(parts))
    if error == 0:
        return Comparison(difference, difference, difference, float(difference == 0))
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (sample, reference), strict=True)
    )
    half_width = student.ppf(1 - LEVEL / 2, freedom) * error
    p = 2 * student.sf(abs(difference) / error, freedom)
    return Comparison(
        difference, float(difference - half_width), float(difference + half_width), float(p)
    )
