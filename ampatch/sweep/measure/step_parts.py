"""How long steps take, and how that time divides: data, forward, backward, optimizer.

The parts meet at ampatch's notices, and together they are the step time:

    end of a step .. a model's forward begins     data: loading, transfer, zero_grad, printing
    .. a loss enters `scale_loss`                 forward, with the loss
    .. its backward pass has ended                backward
    .. the step ends                              optimizer: unscaling, clipping, the step

With several losses or micro-batches in one step their parts are added.  What lies before a
loss without a forward that was noticed, as in a script without AMP code, is data and forward in
one: it is kept as "unsplit", also in a closure that a step calls, and so is all that a script
does whose losses go through no `scale_loss`.

On an accelerator the moments are events in the stream, because the host runs ahead of the device:
the parts are the device's, and "data" contains the time it waits for the host.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ampatch.sweep.measure.probes import BATCH
from ampatch.torch_private.devices import is_owned_by_host, moment, seconds_between

UNSPLIT = "unsplit"
PARTS = ("data", "forward", "backward", "optimizer", UNSPLIT)
STEPS = 2000  # so many are divided; a long run needs no more

_FORWARD, _LOSS, _BACKWARD, _UNSCALED, _BEGIN, _END = range(6)  # the notices


class _StepEnd(NamedTuple):
    """The end of a step: of which optimizer, and what was counted until then."""

    optimizer: int
    segments: int
    cpu_seconds: float  # of all threads of the process
    pauses: int


class StepTimes:
    """Takes the moments of the notices; begins with the end of the first step."""

    def __init__(self) -> None:
        self._device: torch.device | None = None  # whose moments these are
        self._sees_forwards = False
        self._last = _END
        self._in_step = False
        self._moments: list[Any] = []  # that were not read yet
        self._seconds = array("d")  # of the segment that ends at each moment but the first
        self._parts = array("b")  # of each segment: an index into PARTS
        self._ends: list[_StepEnd] = []
        self._steps: Counter[int] = Counter()  # by optimizer

    def forward(self) -> None:
        """A model's forward begins."""
        self._sees_forwards = True
        self._mark(_FORWARD)

    def loss(self) -> None:
        """A loss is there; its backward pass follows."""
        self._mark(_LOSS)

    def backward(self) -> None:
        """The backward pass has ended."""
        self._mark(_BACKWARD)

    def unscaled(self) -> None:
        """The gradients of the pass are unscaled."""
        self._mark(_UNSCALED)

    def step_begins(self) -> None:
        self._mark(_BEGIN)
        self._in_step = True

    def step_ends(self, optimizer: int, device: torch.device, pauses: int = 0) -> int:
        """A step of the optimizer with this id ended; returns how many it has taken.

        `pauses` increases when something other than training ran.
        """
        if self._device is None:
            self._device = device
            self._moments.append(moment(device))
        else:
            self._mark(_END)
        self._last, self._in_step = _END, False
        self._ends.append(_StepEnd(optimizer, len(self._parts), time.process_time(), pauses))
        self._steps[optimizer] += 1
        return self._steps[optimizer]

    def of_main_optimizer(self) -> dict[str, Any]:
        """`step_seconds`, `cpu_seconds` and `parts` of the optimizer that stepped most.

        Its step is the script's iteration.  Each has a value for a step, None for the first and
        for the first after a pause.  On a device that is no CPU there are no CPU seconds.
        """
        if not self._ends or self._device is None:
            return {}
        [(optimizer, _)] = self._steps.most_common(1)
        ends = [end for end in self._ends if end.optimizer == optimizer]
        cpu = [later.cpu_seconds - end.cpu_seconds for end, later in itertools.pairwise(ends)]
        return {
            "step_seconds": _unless_paused(ends, [sum(parts) for parts in self._divided(ends)]),
            "cpu_seconds": _unless_paused(ends, cpu) if is_owned_by_host(self._device) else [],
            "parts": {
                name: _unless_paused(ends, seconds)
                for name, seconds in self.parts_of(optimizer).items()
            },
        }

    def parts_of(self, optimizer: int) -> dict[str, list[float]]:
        """The seconds of each part in the steps of an optimizer, from its second on.

        A part is left out where no step has it.
        """
        ends = [end for end in self._ends[:STEPS] if end.optimizer == optimizer]
        columns = zip(*self._divided(ends))
        return {name: list(column) for name, column in zip(PARTS, columns) if any(column)}

    def _divided(self, ends: list[_StepEnd]) -> list[list[float]]:
        """The seconds of each part from each of the ends to the next."""
        self._read()
        steps = []
        for end, later in itertools.pairwise(ends):
            sums = [0.0] * len(PARTS)
            for segment in range(end.segments, later.segments):
                sums[self._parts[segment]] += self._seconds[segment]
            steps.append([round(seconds, 9) for seconds in sums])
        return steps

    def _mark(self, notice: int) -> None:
        if self._device is None or (len(self._ends) >= STEPS and notice != _END):
            return
        self._moments.append(moment(self._device))
        self._parts.append(PARTS.index(self._part(notice)))
        self._last = notice
        if len(self._moments) > 2 * BATCH:
            self._read(BATCH)  # long past, so a device is not waited for

    def _part(self, notice: int) -> str:
        """The part that ends with `notice`, by the notice that it began with."""
        if self._last == _FORWARD:
            return "forward" if notice in (_FORWARD, _LOSS) else UNSPLIT
        if self._last == _LOSS:
            return "backward"
        if notice == _LOSS:
            return UNSPLIT
        if self._last == _END:
            is_data = notice == _FORWARD or (notice == _BEGIN and self._sees_forwards)
            return "data" if is_data else UNSPLIT
        if self._in_step or self._last == _BACKWARD or notice in (_BEGIN, _END):
            return "optimizer"
        return "data" if notice == _FORWARD else UNSPLIT  # after a micro-batch

    def _read(self, count: int | None = None) -> None:
        """Turn the first `count` moments, or all, into segments."""
        past = self._moments[:count]
        self._seconds.extend(seconds_between(past))
        del self._moments[: len(past) - 1]


def _unless_paused(ends: list[_StepEnd], seconds: list[float]) -> list[float | None]:
    """None for the first end, then the seconds from each to the next, None after a pause."""
    pairs = zip(itertools.pairwise(ends), seconds)
    times = [one if end.pauses == later.pauses else None for (end, later), one in pairs]
    return [None, *times]


class ForwardNotice:
    """A forward pre-hook that calls `tell`; in a copy or a pickle of the model it does nothing."""

    def __init__(self, tell: Callable[[], None] | None = None) -> None:
        self._tell = tell

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._tell is not None and not torch.compiler.is_compiling():
            self._tell()

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardNotice, ()
