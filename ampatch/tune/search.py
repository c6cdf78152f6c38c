"""The smallest set of remedies with which training passes, by few trials.

The remedies come in the order in which they are likely to be needed.  The first k of them pass if
all that are needed are among them, and more of them never make it worse.  So the smallest k that
passes names one that is needed, the k-th.  With that one in place the next smallest k names the
next, until those found pass by themselves.  This is the idea of QuickXplain (U. Junker, AAAI 2004)
with the preferences of Precimonious (C. Rubio-Gonzalez and others, SC 2013).

k is sought by doubling and then by bisection, because the order is a good guess: m needed among the
first k take about 2 m log2(k) trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Remedy = TypeVar("Remedy", bound=Hashable)


@dataclass(frozen=True)
class Found(Generic[Remedy]):
    """The outcome: `needed` passes, unless `passes` is False: then not even all remedies do.

    `is_decided`: training fails without any one of them, or with all of them, as far as the trials
    can tell.  False where the trials were used up before that was shown.
    """

    needed: tuple[Remedy, ...]
    passes: bool
    is_decided: bool
    trials: int


class OutOfTrials(Exception):
    """The search has used up its trials."""


def most_trials(remedies: int) -> int:
    """How many candidates are tried at most, by default: about those that two faults take."""
    return 2 * math.ceil(math.log2(remedies + 1)) + 8


def smallest(
    remedies: Sequence[Remedy],
    passes: Callable[[frozenset[Remedy]], bool],
    most: int,
) -> Found[Remedy]:
    """The smallest subset of `remedies` that passes, of which the first ones are likeliest.

    `passes` runs a candidate; no candidate is asked for twice.  That nothing at all does not pass
    is known.  `most` is the number of candidates that may be tried.
    """
    known: dict[frozenset[Remedy], bool] = {frozenset(): False}

    def tried(chosen: Sequence[Remedy]) -> bool:
        candidate = frozenset(chosen)
        if candidate not in known:
            if len(known) > most:
                raise OutOfTrials
            known[candidate] = passes(candidate)
        return known[candidate]

    needed: list[Remedy] = []

    def first(count: int) -> bool:
        return tried([*needed, *left[:count]])

    left = list(remedies)
    try:
        while not first(0):
            count = _least(len(left), first)
            if count is None:
                return Found((), False, True, len(known) - 1)
            needed, left = [*needed, left[count - 1]], left[: count - 1]
        return Found(_in_order(needed, remedies), True, True, len(known) - 1)
    except OutOfTrials:
        passed = [candidate for candidate, fine in known.items() if fine]
        best = min(passed, key=len, default=frozenset())
        return Found(_in_order(best, remedies), bool(passed), False, len(known) - 1)


def _least(n: int, passes: Callable[[int], bool]) -> int | None:
    """The smallest k of 1 to n that passes; None if n does not.  0 is known to fail."""
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
