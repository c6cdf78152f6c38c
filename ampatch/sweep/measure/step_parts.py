"""How the time of a step divides: data, forward, backward, optimizer.

The parts meet at ampatch's notices, and together they are the step time:

    end of a step .. a model's forward begins     data: loading, transfer, zero_grad, printing
    .. a loss enters `scale_loss`                 forward, with the loss
    .. its backward pass has ended                backward
    .. the step ends                              optimizer: unscaling, clipping, the step

With several losses or micro-batches in one step their parts are added.  What lies between a
step and its loss without a forward that was noticed, as in a script without AMP code, is data
and forward in one: it is kept as "unsplit", and so is all that a script does whose losses go
through no `scale_loss`.

On an accelerator the moments are events in the stream: the parts are the device's, and "data"
contains the time it waits for the host.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ampatch.sweep.measure.probes import BATCH
from ampatch.torch_private.devices import moment, seconds_between

UNSPLIT = "unsplit"
PARTS = ("data", "forward", "backward", "optimizer", UNSPLIT)
STEPS = 2000  # so many are divided; a long run needs no more

_FORWARD, _LOSS, _BACKWARD, _UNSCALED, _BEGIN, _END = range(6)  # the notices


class StepParts:
    """Takes the moments of the notices; begins with the end of the first step."""

    def __init__(self) -> None:
        self._device: torch.device | None = None  # whose moments these are
        self._first: int | None = None  # the optimizer whose step started the clock
        self._sees_forwards = False
        self._last = _END
        self._in_step = False
        self._moments: list[Any] = []
        self._seconds = array("d")  # of the segment that ends at each moment but the first
        self._parts = array("b")  # of each segment: an index into PARTS
        self._ended: list[int | None] = []  # with each segment: the optimizer that stepped, if any
        self._left = STEPS

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

    def step_ends(self, optimizer: int, device: torch.device) -> None:
        """A step of the optimizer with this id ended."""
        if self._device is None:
            self._device, self._first = device, optimizer
            self._moments.append(moment(device))
        else:
            self._mark(_END, optimizer)
        self._last, self._in_step = _END, False
        self._left -= 1

    def of_steps(self, optimizer: int) -> dict[str, list[float | None]]:
        """For each part its seconds in each step of this optimizer; None in its first.

        A part is left out where no step has it.
        """
        self._read()
        steps: list[list[float]] = []
        sums = [0.0] * len(PARTS)
        for seconds, part, ended in zip(self._seconds, self._parts, self._ended):
            sums[part] += seconds
            if ended == optimizer:
                steps.append(sums)
                sums = [0.0] * len(PARTS)
        whole = steps if self._first == optimizer else steps[1:]
        return {
            name: [None, *(round(step[part], 9) for step in whole)]
            for part, name in enumerate(PARTS)
            if any(step[part] for step in whole)
        }

    def _mark(self, notice: int, optimizer: int | None = None) -> None:
        if self._device is None or self._left <= 0:
            return
        self._moments.append(moment(self._device))
        self._parts.append(PARTS.index(self._part(notice)))
        self._ended.append(optimizer)
        self._last = notice
        if len(self._moments) > 2 * BATCH:
            self._read(BATCH)  # long past, so a device is not waited for

    def _part(self, notice: int) -> str:
        """The part that ends with `notice`, by the notice that it began with."""
        if self._last == _FORWARD:
            return "forward" if notice in (_FORWARD, _LOSS) else UNSPLIT
        if self._last == _LOSS:
            return "backward"
        if self._last == _END:
            is_data = notice == _FORWARD or (notice == _BEGIN and self._sees_forwards)
            return "data" if is_data else UNSPLIT
        if self._in_step or self._last == _BACKWARD or notice in (_BEGIN, _END):
            return "optimizer"
        return "data" if notice == _FORWARD else UNSPLIT  # after a micro-batch

    def _read(self, count: int | None = None) -> None:
        """Turn the first `count` moments, or all, into segments."""
        if self._device is not None:
            past = self._moments[:count]
            self._seconds.extend(seconds_between(past))
            del self._moments[: len(past) - 1]


class ForwardNotice:
    """A forward pre-hook that calls `tell`; in a copy or a pickle of the model it does nothing."""

    def __init__(self, tell: Callable[[], None] | None = None) -> None:
        self._tell = tell

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._tell is not None and not torch.compiler.is_compiling():
            self._tell()

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardNotice, ()
