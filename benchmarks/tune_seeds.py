"""How often `ampatch tune` answers with a wrong set, and refuses the right one, by seeds.

Simulated: differences from O0 are normal, of scatter 1, and a wrong set is worse by `SHIFT`.
The test is that of a sweep: paired, two-sided, at the level of 5 %.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator

import numpy as np
from measuring import table
from scipy import stats

SHIFT = 2.0  # in units of the scatter
DRAWS = 40_000
CANDIDATES = 4
PASSES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "half of them alone": lambda half, other: _fine(half),
    "half, and then the other half alone": lambda half, other: _fine(half) & _fine(other),
    "half, and then all": lambda half, other: _fine(half) & _fine(_all(half, other)),
    "all, for every candidate": lambda half, other: _fine(_all(half, other)),
}
"""Which candidates pass, of the differences with one half of the seeds and with the other."""


def report(options: Namespace) -> Iterator[str]:
    """A row per rule."""
    numbers = np.random.default_rng(0)
    shape = (DRAWS, CANDIDATES, options.seeds // 2)
    halves = [numbers.normal(0, 1, shape) for _ in range(2)]
    rows = []
    for rule, passes in PASSES.items():
        wrong = passes(*(half + SHIFT for half in halves))
        right = passes(*halves)
        found = (wrong[:, 0].mean(), wrong.any(1).mean(), 1 - right[:, 0].mean())
        rows.append([rule, *(f"{100 * share:.1f} %" for share in found)])
    yield table(
        ["seeds", "one wrong set passes", f"one of {CANDIDATES} does", "the right set is refused"],
        rows,
    )


def _all(half: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.concatenate([half, other], -1)


def _fine(differences: np.ndarray) -> np.ndarray:
    """Whether the test does not show that a set is worse."""
    n = differences.shape[-1]
    error = differences.std(-1, ddof=1) / np.sqrt(n)
    return differences.mean(-1) / error <= stats.t.isf(0.025, n - 1)
