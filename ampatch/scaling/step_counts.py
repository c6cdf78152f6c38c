"""The steps that an optimizer took and skipped, counted on the host or on the device.

For most optimizers the host decides whether to step.  Fused optimizers decide on the
device.  Their steps are counted there, without a wait: the host reads a copy of the counts
after the copy has arrived.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from ..torch_private import foreach
from ..torch_private.devices import LateCopy, is_captured
from .gradients import Gradients
from .loss_scaler import DynamicScaler, Scaler

_stack = torch.ops.aten.stack.default
"""Not the function that is patched: reports would count the call as the script's."""


class StepCounts(NamedTuple):
    """Of one optimizer since `initialize`."""

    taken: int
    skipped: int
    skipped_in_a_row: int


class News(NamedTuple):
    """What is to be reported of skipped steps."""

    counts: StepCounts
    steps: int  # since the last report
    skipped: int  # of these
    is_due: bool  # a report is due now
    is_long_row: bool  # as many in a row as the limit
    scaler: Scaler | None  # that saw the overflow
    scales: list[float]  # of its last blocks, and the present one


class StepCounter:
    """The counts of one optimizer."""

    def __init__(self) -> None:
        self._taken = self._skipped = self._row = 0  # while the host knows
        self._on_device: Tensor | None = None  # all steps, the skipped, those in a row
        self._places: list[Tensor] = []  # the same, one by one
        self._copy: LateCopy | None = None
        self._beside: tuple[list[float], Scaler | None] = ([], None)  # what the copy is of
        self._unseen = 0  # steps since the last look
        self._blocks = 0  # that had begun then
        self._reported = StepCounts(0, 0, 0)  # at the last report
        self._due = 1  # as many skipped steps make the next report
        self._reported_scale = 0.0
        self._reported_row = False

    def note(self, skipped: bool | Tensor) -> None:
        """Count a step.  A tensor, 0-dim and not 0 for a skipped step, is not waited for."""
        if isinstance(skipped, Tensor):
            self._note_on_device(skipped)
        elif self._on_device is not None:
            self._note_on_device(torch.full_like(self._places[0], float(skipped)))
        elif skipped:
            self._skipped += 1
            self._row += 1
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

    def news(self, limit: int, gradients: Gradients) -> News | None:
        """What is to be reported after a step; never waits.

        The first ten skipped steps and then each doubling of their number; and `limit` of them in
        a row, once for each such row.  What an accelerator counts or scales by itself is known
        some steps late, counts at most about a quarter of `limit`.
        """
        if self._on_device is not None:
            self._unseen += 1
            if is_captured(self._on_device):
                return None
        if self._copy is None:
            if not self._is_to_look(limit):
                if self._on_device is None:
                    self._blocks = gradients.blocks
                return None
            self._look(gradients)
        found, scaler = self._beside
        if self._copy is not None:
            late = self._copy.value()
            if late is None:
                return None
            self._copy, found = None, [*found, *late]
        return self._news_of(limit, found, scaler)

    def _is_to_look(self, limit: int) -> bool:
        if self._on_device is not None:
            return self._unseen >= max(1, limit // 4)
        self._reported_row &= self._row > 0
        is_new_row = self._row >= limit and not self._reported_row
        return self._row > 0 and (self._skipped >= self._due or is_new_row)

    def _look(self, gradients: Gradients) -> None:
        """Note the counts and scales that the host knows, and have a copy made of the others."""
        scaler, scales = gradients.scaler, []
        if isinstance(scaler, DynamicScaler):
            scales = scaler.recent(gradients.blocks - self._blocks)
        self._unseen, self._blocks = 0, gradients.blocks
        known: list[float] = []
        if self._on_device is None:
            known = [self._taken + self._skipped, self._skipped, self._row]
        late = [*self._places, *scales]
        self._beside = known, scaler
        if late:
            place = late[0].device
            self._copy = LateCopy(_stack([number.to(place) for number in late]))

    def _news_of(self, limit: int, numbers: list[float], scaler: Scaler | None) -> News | None:
        steps, skipped, row = map(int, numbers[:3])
        was_reported, self._reported_row = self._reported_row, row >= limit
        is_due, is_long_row = skipped >= self._due, self._reported_row and not was_reported
        if not (is_due or is_long_row):
            return None
        counts, before = StepCounts(steps - skipped, skipped, row), self._reported
        if is_due:
            self._reported = counts
            self._due = skipped + 1 if skipped < 10 else 10 << (skipped // 10).bit_length()
        since = steps - before.taken - before.skipped, skipped - before.skipped
        scales = [scale for scale, _ in itertools.groupby(numbers[3:])]
        if self._reported_scale in scales:  # with several losses there are earlier ones before it
            scales = scales[scales.index(self._reported_scale) :]
        self._reported_scale = scales[-1] if scales else 0.0
        return News(counts, *since, is_due, is_long_row, scaler, scales)
