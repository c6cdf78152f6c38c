"""Warns once if the first step at O2 changes no master weight at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...log import logger
from ...torch_private.devices import is_captured
from ...torch_private.dtensors import are_laid_out_alike, local_of
from ..master_weights import MasterWeights

_Sample = tuple[Tensor, Tensor, Tensor, Tensor]  # master's values, index, gradient and value there


class IdleSteps:
    """Says once if an optimizer's first step changes no master although gradients are not zero.

    Of each master, of a DTensor this rank's part, the element with the largest gradient is
    looked at.  Waits for the device after that one step.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.is_done = False

    def before(self, masters: MasterWeights) -> list[_Sample]:
        """What to look at again after the step."""
        if not any(group.get("lr", 1.0) != 0 for group in self._optimizer.param_groups):
            return []  # nothing is to change; the next step may tell
        samples: list[_Sample] = []
        for _, master in masters:
            grad = master.grad
            if grad is None or not are_laid_out_alike(grad, master):
                continue
            grad, value = local_of(grad), local_of(master).detach()
            if not grad.is_sparse and grad.numel() and not is_captured(grad):
                grad = grad.detach()
                index = grad.abs().argmax()
                samples.append((value, index, grad.take(index), value.take(index)))
        return samples

    def after(self, samples: list[_Sample], skipped: bool | Tensor) -> None:
        """The step is over."""
        if not samples:
            return
        self.is_done = True
        home = samples[0][0].device
        moved = [master.take(index) != value for master, index, _, value in samples]
        wanted = [grad != 0 for _, _, grad, _ in samples]
        flags = torch.stack([one.to(home) for one in (*moved, *wanted)]).tolist()
        if any(flags[len(moved) :]) and not any(flags[: len(moved)]) and not bool(skipped):
            logger.warning(
                "%s.step() changed no FP32 master weight although gradients are not zero. At this "
                "opt level optimizer.param_groups hold the masters, and this optimizer updates "
                "something else: it may keep parameters in a place of its own. "
                'Use opt_level="O1", where the weights stay FP32.',
                type(self._optimizer).__name__,
            )
