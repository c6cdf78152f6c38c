"""Do two small samples differ by more than their scatter?  Welch's t test, from scipy.

B. L. Welch, "The generalization of 'Student's' problem when several different
population variances are involved", Biometrika 34 (1947), 28-35.  The samples
may scatter differently, as a half type and FP32 may.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
MISSING = (
    "Accuracy is not tested: scipy is not installed. pip install scipy, or pip install "
    "ampatch[sweep]; then --resume tests what has run."
)


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


def available() -> bool:
    """Whether scipy is installed."""
    return importlib.util.find_spec("scipy") is not None


def welch(sample: Sequence[float], base: Sequence[float]) -> Welch:
    """Compare `sample` with `base`, each of two or more finite values.  Needs scipy."""
    difference = statistics.fmean(sample) - statistics.fmean(base)
    scatter = pooled_sd(sample, base)
    if scatter == 0:  # scipy divides by it and returns NaN
        pooled_sds = math.copysign(math.inf, difference) if difference else 0.0
        return Welch(difference, float(difference == 0), difference, difference, pooled_sds)
    from scipy.stats import ttest_ind

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of samples that are equal but for digits
        tested = ttest_ind(sample, base, equal_var=False)
    interval = tested.confidence_interval(CONFIDENCE)
    return Welch(
        difference,
        float(tested.pvalue),
        float(interval.low),
        float(interval.high),
        difference / scatter,
    )


def pooled_sd(sample: Sequence[float], base: Sequence[float]) -> float:
    """The standard deviation of both, each around its own mean."""
    squares = sum(statistics.variance(values) * (len(values) - 1) for values in (sample, base))
    return math.sqrt(squares / (len(sample) + len(base) - 2))
