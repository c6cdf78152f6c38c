"""The steps that an optimizer took and skipped, counted on the host or on the device.

For most optimizers the host decides whether to step.  Fused optimizers decide on the
device, and their steps are counted there.  The host does not wait for these counts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..torch_private import foreach
from ..torch_private.devices import LateCopy, is_captured


class StepCounts(NamedTuple):
    """The steps of one optimizer since `initialize`."""

    taken: int
    skipped: int
    skipped_in_a_row: int


class StepCounter:
    """The counts of one optimizer."""

    def __init__(self) -> None:
        self._taken = self._skipped = self._in_a_row = 0  # until a device counts
        self._on_device: Tensor | None = None  # all steps, the skipped ones, those in a row
        self._numbers: list[Tensor] = []  # its three elements
        self._copy: LateCopy | None = None
        self._unseen = 0  # steps since the last copy
        self._told = 0  # skipped steps in all news so far

    def record(self, skipped: bool | Tensor) -> None:
        """Count a step.  A 0-dim tensor, not 0 for a skipped step, is not waited for."""
        if isinstance(skipped, Tensor):
            self._record_on_device(skipped)
        elif self._on_device is not None:
            self._record_on_device(torch.full_like(self._numbers[0], float(skipped)))
        elif skipped:
            self._skipped += 1
            self._in_a_row += 1
        else:
            self._taken += 1
            self._in_a_row = 0

    def _record_on_device(self, skipped: Tensor) -> None:
        if self._on_device is None:
            self._on_device = skipped.new_empty(3)
            self._numbers = list(self._on_device.unbind())
            numbers = (self._taken + self._skipped, self._skipped, self._in_a_row)
            for element, number in zip(self._numbers, numbers, strict=True):
                element.fill_(float(number))
        steps, left_out, run_length = self._numbers
        skipped = skipped.to(steps.device)
        foreach.add_([steps, left_out], [torch.ones_like(skipped), skipped])
        torch.addcmul(skipped, run_length, skipped, out=run_length)  # one more than before, or 0

    def read(self) -> StepCounts:
        """The counts.  Waits for the device if it has them."""
        if self._on_device is None:
            return StepCounts(self._taken, self._skipped, self._in_a_row)
        return _counts(self._on_device.tolist())

    def news(self, limit: int) -> tuple[StepCounts, int] | None:
        """The counts, and how many of the skipped steps are new since the last news.

        None where none is new, or where the host would have to wait: counts of a device are copied
        every `limit // 4` steps, and read once they have arrived.
        """
        if self._on_device is None and self._skipped == self._told:
            return None
        counts = self.read() if self._on_device is None else self._arrived(self._on_device, limit)
        if counts is None or counts.skipped == self._told:
            return None
        new, self._told = counts.skipped - self._told, counts.skipped
        return counts, new

    def _arrived(self, on_device: Tensor, limit: int) -> StepCounts | None:
        self._unseen += 1
        if is_captured(on_device):
            return None
        if self._copy is None and self._unseen >= limit // 4:
            self._copy, self._unseen = LateCopy(on_device), 0
        if self._copy is None or (numbers := self._copy.value()) is None:
            return None
        self._copy = None
        return _counts(numbers)


def _counts(numbers: list[float]) -> StepCounts:
    steps, skipped, run_length = map(int, numbers)
    return StepCounts(steps - skipped, skipped, run_length)
