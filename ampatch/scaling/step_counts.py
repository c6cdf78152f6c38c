"""How many steps an optimizer took and how many it left out, counted where it is decided.

Most optimizers are told by the host whether to step.  Fused ones decide on the
device, and there they are counted, without a wait; the host only looks at a copy
that has arrived by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import foreach


class StepCounts(NamedTuple):
    """Of one optimizer since `initialize`."""

    taken: int
    skipped: int
    skipped_in_a_row: int


class StepCounter:
    """The counts of one optimizer."""

    def __init__(self) -> None:
        self._taken = self._skipped = self._row = 0  # while the host knows
        self._on_device: list[Tensor] | None = None  # all steps, the skipped, those in a row
        self._copy: _Copy | None = None
        self._unseen = 0  # steps since the last look
        self._told = False

    def note(self, skipped: bool | Tensor) -> None:
        """Count a step.  A tensor, 0-dim and not 0 for a skipped step, is not waited for."""
        if isinstance(skipped, Tensor):
            self._note_on_device(skipped)
        elif self._on_device is not None:
            self._note_on_device(torch.full_like(self._on_device[0], float(skipped)))
        elif skipped:
            self._skipped += 1
            self._row += 1
        else:
            self._taken += 1
            self._row = 0

    def _note_on_device(self, found: Tensor) -> None:
        if self._on_device is None:
            numbers = (self._taken + self._skipped, self._skipped, self._row)
            self._on_device = [torch.full_like(found, float(number)) for number in numbers]
        steps, left_out, row = self._on_device
        found = found.to(steps.device)
        foreach.add_([steps, left_out], [torch.ones_like(found), found])
        torch.addcmul(found, row, found, out=row)  # one more than before, or 0

    def read(self) -> StepCounts:
        """The counts.  Waits for the device if it has them."""
        if self._on_device is None:
            return StepCounts(self._taken, self._skipped, self._row)
        steps, left_out, row = (int(count.item()) for count in self._on_device)
        return StepCounts(steps - left_out, left_out, row)

    def stuck(self, limit: int) -> bool:
        """Whether `limit` steps in a row were skipped: True once for each such row.  Never waits.

        On an accelerator that decides by itself it is known some steps late, at most
        about a quarter of `limit`.
        """
        row = self._row
        if self._on_device is not None:
            row = self._row_on_device(max(1, limit // 4))
        if row is None:
            return False
        told, self._told = self._told, row >= limit
        return self._told and not told

    def _row_on_device(self, every: int) -> int | None:
        """Skipped steps in a row, or None if that is not known now."""
        row = self._on_device[2]
        if row.device.type == "cpu":
            return int(row.tolist())  # memory of the host: nothing to wait for
        self._unseen += 1
        if _is_capturing(row):
            return None
        if self._copy is None and self._unseen >= every:
            self._copy, self._unseen = _Copy(row), 0
        value = None if self._copy is None else self._copy.value()
        if value is not None:
            self._copy = None
        return value


class _Copy:
    """A number on its way to the host."""

    def __init__(self, number: Tensor) -> None:
        self._event = None
        if number.device.type == "cuda":
            self._host = torch.empty((), dtype=number.dtype, pin_memory=True)
            self._host.copy_(number, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(number.device))
        else:  # no way known to ask whether it has arrived
            self._host = number.cpu()

    def value(self) -> int | None:
        """The number, once it has arrived."""
        if self._event is not None and not self._event.query():
            return None
        return int(self._host.tolist())


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
