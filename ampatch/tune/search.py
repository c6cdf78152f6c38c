"""The smallest set of remedies with which training passes, in few trials.

The remedies are in order, the likeliest first.  More remedies never make training worse, so the
first k of them pass if they include all needed remedies.  For the smallest such k, the k-th remedy
is needed.  With this remedy applied, the next smallest k gives the next needed remedy, until the
remedies found so far pass alone.  This is the idea of QuickXplain (U. Junker, AAAI 2004) with the
preferences of Precimonious (C. Rubio-Gonzalez and others, SC 2013).

k is found by doubling and then bisection, because the order is a good guess: m needed remedies
among the first k take about 2 m log2(k) trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Remedy = TypeVar("Remedy", bound=Hashable)


@dataclass(frozen=True)
class SearchResult(Generic[Remedy]):
    """The set `needed` passes, unless `passes` is False: then no set is known to pass.

    `is_decided` is True if trials have shown that training fails without any one of `needed`, or
    even with all remedies.  It is False if the trials were used up first.  `trials` is the number
    of candidates that ran.
    """

    needed: tuple[Remedy, ...]
    passes: bool
    is_decided: bool
    trials: int


class OutOfTrials(Exception):
    """The search has used up its trials."""


def max_trials(remedies: int) -> int:
    """The default limit of candidates: about as many as it takes to find two needed remedies."""
    return 2 * math.ceil(math.log2(remedies + 1)) + 8


def smallest_passing_set(
    remedies: Sequence[Remedy],
    passes: Callable[[frozenset[Remedy]], bool],
    limit: int,
) -> SearchResult[Remedy]:
    """The smallest subset of `remedies`, the likeliest first, that passes.

    `passes` runs a candidate; no candidate runs twice.  The empty set is known to fail.  At most
    `limit` candidates are run.
    """
    results: dict[frozenset[Remedy], bool] = {frozenset(): False}

    needed: list[Remedy] = []
    remaining = list(remedies)

    def passes_with_first(count: int) -> bool:
        candidate = frozenset([*needed, *remaining[:count]])
        if candidate not in results:
            if len(results) > limit:
                raise OutOfTrials
            results[candidate] = passes(candidate)
        return results[candidate]

    try:
        while not passes_with_first(0):
            count = _smallest_passing_count(len(remaining), passes_with_first)
            if count is None:
                return SearchResult((), False, True, len(results) - 1)
            needed, remaining = [*needed, remaining[count - 1]], remaining[: count - 1]
        return SearchResult(_in_order(needed, remedies), True, True, len(results) - 1)
    except OutOfTrials:
        passed = [candidate for candidate, has_passed in results.items() if has_passed]
        best = min(passed, key=len, default=frozenset())
        return SearchResult(_in_order(best, remedies), bool(passed), False, len(results) - 1)


def _smallest_passing_count(n: int, passes: Callable[[int], bool]) -> int | None:
    """The smallest k from 1 to n that passes; None if n fails.  0 is known to fail."""
    failed, k = 0, 1
    while k < n and not passes(k):
        failed, k = k, 2 * k
    k = min(k, n)
    if k == n and not passes(n):
        return None
    while k - failed > 1:
        middle = (failed + k) // 2
        if passes(middle):
            k = middle
        else:
            failed = middle
    return k


def _in_order(chosen: Collection[Remedy], remedies: Sequence[Remedy]) -> tuple[Remedy, ...]:
    return tuple(remedy for remedy in remedies if remedy in chosen)
