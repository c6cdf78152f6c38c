"""Step times: from the end of an optimizer step to the end of the next.

On an accelerator, each end is an event in the stream, because the host runs ahead of the device.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections import Counter
from typing import Any, NamedTuple

import torch

from ampatch.device_figures import record_time, seconds_between
from ampatch.sweep.measure.readings import BATCH
from ampatch.torch_private.devices import can_read_without_sync


class _StepEnd(NamedTuple):
    """The end of a step."""

    optimizer: int  # id of the optimizer
    cpu_seconds: float  # CPU time of all threads of the process before this end
    pauses: int  # number of pauses before this end


class StepTimes:
    """Records when the steps of all optimizers end."""

    def __init__(self) -> None:
        self._device: torch.device | None = None  # device of the first step
        self._unread_moments: list[Any] = []
        self._seconds = array("d")  # seconds from each end to the next
        self._ends: list[_StepEnd] = []
        self._steps: Counter[int] = Counter()  # number of steps by optimizer

    def record_step_end(self, optimizer: int, device: torch.device, pauses: int = 0) -> int:
        """Record the end of a step of the optimizer with this id; return its number of steps.

        `pauses` increases when something other than training ran.
        """
        if self._device is None:
            self._device = device
        self._unread_moments.append(record_time(self._device))
        if len(self._unread_moments) > 2 * BATCH:
            self._read(BATCH)  # these ends are long past, so the read does not wait for the device
        self._ends.append(_StepEnd(optimizer, time.process_time(), pauses))
        self._steps[optimizer] += 1
        return self._steps[optimizer]

    def of_main_optimizer(self) -> dict[str, list[float | None]]:
        """`step_seconds` and `cpu_seconds` of the optimizer that stepped most often.

        A step of this optimizer counts as an iteration of the script.  Each list has a value for
        each step, which is None for the first step and for the first step after a pause.  On an
        accelerator, `cpu_seconds` is empty.
        """
        if self._device is None:
            return {}
        self._read(len(self._unread_moments))
        [(optimizer, _)] = self._steps.most_common(1)
        indices = [index for index, end in enumerate(self._ends) if end.optimizer == optimizer]
        wall: list[float | None] = [None]
        cpu: list[float | None] = [None]
        for earlier, later in itertools.pairwise(indices):
            before, after = self._ends[earlier], self._ends[later]
            paused = before.pauses != after.pauses
            wall.append(None if paused else round(sum(self._seconds[earlier:later]), 9))
            cpu.append(None if paused else after.cpu_seconds - before.cpu_seconds)
        return {
            "step_seconds": wall,
            "cpu_seconds": cpu if can_read_without_sync(self._device) else [],
        }

    def _read(self, count: int) -> None:
        """Convert the first `count` unread moments to seconds."""
        past = self._unread_moments[:count]
        self._seconds.extend(seconds_between(past))
        del self._unread_moments[: len(past) - 1]
