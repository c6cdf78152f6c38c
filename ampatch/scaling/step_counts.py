"""The steps that an optimizer took and skipped, counted on the host or on the device.

For most optimizers the host decides whether to step.  Fused optimizers decide on the
device.  Their steps are counted there, without a wait: the host reads a copy of the counts
after the copy has arrived.
"""

from __future__ import annotations

import collections
from typing import NamedTuple

import torch
from torch import Tensor

from ..torch_private import foreach
from ..torch_private.devices import LateCopy, is_captured


class StepCounts(NamedTuple):
    """Of one optimizer since `initialize`."""

    taken: int
    skipped: int
    skipped_in_a_row: int


class News(NamedTuple):
    """Too many of the last steps were skipped; `in_a_row`: all of them, as many as the limit."""

    skipped: int
    steps: int
    in_a_row: bool


WINDOW = 200  # steps that are looked back on
_MANY = WINDOW // 20  # skipped steps among them that are still no news
_SEARCH = 16  # skipped steps in front of the first taken one: a scale of 2**16 comes down to 1


class StepCounter:
    """The counts of one optimizer."""

    def __init__(self) -> None:
        self._taken = self._skipped = self._row = 0  # while the host knows
        self._searched = 0  # of the skipped, those in front of the first that was taken
        self._on_device: Tensor | None = None  # all steps, the skipped, those in a row
        self._places: list[Tensor] = []  # the same, one by one
        self._copy: LateCopy | None = None
        self._unseen = 0  # steps since the last look
        self._looks: collections.deque[tuple[int, int]] = collections.deque()  # steps and skipped
        self._said_row = self._said_rate = False

    def note(self, skipped: bool | Tensor) -> None:
        """Count a step.  A tensor, 0-dim and not 0 for a skipped step, is not waited for."""
        if isinstance(skipped, Tensor):
            self._note_on_device(skipped)
        elif self._on_device is not None:
            self._note_on_device(torch.full_like(self._places[0], float(skipped)))
        elif skipped:
            self._skipped += 1
            self._row += 1
            self._searched += not self._taken
        else:
            self._taken += 1
            self._row = 0

    def _note_on_device(self, found: Tensor) -> None:
        if self._on_device is None:
            self._on_device = found.new_empty(3)
            self._places = list(self._on_device.unbind())
            numbers = (self._taken + self._skipped, self._skipped, self._row)
            for place, number in zip(self._places, numbers, strict=True):
                place.fill_(float(number))
        steps, left_out, row = self._places
        found = found.to(steps.device)
        foreach.add_([steps, left_out], [torch.ones_like(found), found])
        torch.addcmul(found, row, found, out=row)  # one more than before, or 0

    def read(self) -> StepCounts:
        """The counts.  Waits for the device if it has them."""
        if self._on_device is None:
            return StepCounts(self._taken, self._skipped, self._row)
        steps, left_out, row = map(int, self._on_device.tolist())
        return StepCounts(steps - left_out, left_out, row)

    def skipped_in_training(self) -> int:
        """The skipped steps without those that found the first loss scale: at most 16, before the
        first taken step.  Waits for the device if it has the counts.
        """
        counts = self.read()
        if not counts.taken:
            return counts.skipped if counts.skipped > _SEARCH else 0
        if self._on_device is not None and not self._looks:  # too few for a look
            return max(0, counts.skipped - _SEARCH)
        return counts.skipped - self._search()

    def _search(self) -> int:
        return self._searched if self._searched <= _SEARCH else 0

    def news(self, limit: int) -> News | None:
        """What is to be said after a step; never waits.

        `limit` skipped steps in a row are said once for each such row; more than a twentieth
        of the last 200 once for each such spell, those in front of the first taken step only
        if they are more than 16.  On an accelerator that decides by itself it is known some
        steps late, at most about a quarter of `limit`.
        """
        if self._on_device is None:
            if not self._row:
                self._said_row = False
                return None
            steps, skipped, row = self._taken + self._skipped, self._skipped, self._row
        else:
            numbers = self._numbers_on_device(self._on_device, max(1, limit // 4))
            if numbers is None:
                return None
            steps, skipped, row = map(int, numbers)
            if not self._looks:  # how many were in front is not counted there
                self._searched = skipped if skipped == steps else min(skipped, _SEARCH)
        news = None
        if skipped < steps or skipped > _SEARCH:
            news = self._spell(steps, skipped)
        said, self._said_row = self._said_row, row >= limit
        if self._said_row:
            return None if said else News(row, row, True)
        return news

    def _numbers_on_device(self, numbers: Tensor, every: int) -> list[float] | None:
        """All steps, the skipped and those in a row, or None if that is not known now."""
        if numbers.is_cpu:
            return numbers.tolist()  # memory of the host: nothing to wait for
        self._unseen += 1
        if is_captured(numbers):
            return None
        if self._copy is None and self._unseen >= every:
            self._copy, self._unseen = LateCopy(numbers), 0
        value = None if self._copy is None else self._copy.value()
        if value is not None:
            self._copy = None
        return value

    def _spell(self, steps: int, skipped: int) -> News | None:
        """How many of the last steps were skipped, once they are too many; counts come in now and
        then.
        """
        looks = self._looks
        if not looks:
            looks.append((self._search(), self._search()))
        looks.append((steps, skipped))
        while len(looks) > 1 and looks[1][0] <= steps - WINDOW:
            looks.popleft()
        inside = skipped - looks[0][1]
        said, self._said_rate = self._said_rate, inside > _MANY // (2 if self._said_rate else 1)
        if said or not self._said_rate:
            return None
        return News(inside, min(steps - looks[0][0], WINDOW), False)
