"""What is said of steps: skipped ones, one without `scale_loss`, weights that became half."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config.opt_levels import HALF_TYPES
from ..log import logger
from .gradients import Gradients
from .step_counts import StepCounter, StepCounts
from .unscaling import values

_SHOWN = 5  # parameters named
_EACH = 10  # skips in a row from which not each one has a line
_LEFT_OVER = (
    "gradients of an earlier overflow are still in p.grad; call optimizer.zero_grad() after each "
    "step, also after a skipped one"
)


class Known(Protocol):
    """What a report needs to know of the session."""

    max_skips: int  # in a row, until they are an error
    last_loss: Callable[[], Tensor | None]  # what the last block was given, if it is still there

    @property
    def wants_blocks(self) -> bool:
        """Whether steps are to come after `scale_loss`."""

    def names(self) -> dict[int, str]:
        """Module paths of the models' parameters, by ids of the parameters."""

    def converted(self) -> set[int]:
        """Ids of the parameters that a level has made half."""


class StepReports:
    """The messages about the steps of one optimizer."""

    def __init__(self, optimizer: Any, gradients: Gradients, counter: StepCounter) -> None:
        self._optimizer = optimizer
        self._name = type(optimizer).__name__
        self._gradients = gradients
        self._counter = counter
        self._has_warned = False
        self._has_told_of_loss = False
        self._steps = 0
        self._first_dtypes: dict[int, torch.dtype] = {}  # by the ids of parameters

    def begin(self) -> None:
        """Note the dtypes that parameters have now."""
        self._made_half()

    def after_step(self, known: Known) -> None:
        """Say what there is to say about the step that has ended."""
        if (news := self._counter.news(known.max_skips)) is not None:
            self._say_skipped(*news, known)
        if known.wants_blocks and not (self._gradients.had_block or self._has_warned):
            self._warn_without_block()
        self._steps += 1
        if not self._steps & (self._steps - 1):  # after 1, 2, 4, 8, ...
            self._warn_of_new_half(known)

    def _say_skipped(self, counts: StepCounts, new: int, known: Known) -> None:
        """`new` more steps were skipped; from the tenth in a row on each doubling has its line.

        An error about a row of them waits for the device.  A loss on a device is looked at in the
        tenth skip of a row, where a wait costs nothing any more.
        """
        row = counts.skipped_in_a_row
        is_left_over = row > 1 and self._gradients.is_left_over()
        words = "a step" if new == 1 else f"{new} steps"
        if row >= _EACH:
            words = f"{row} steps in a row"
        if row < _EACH or (row // _EACH).bit_length() > (max(0, row - new) // _EACH).bit_length():
            logger.info(
                "Gradient overflow: %s skipped %s (%d of %d since initialize)%s.",
                *(self._name, words, counts.skipped, counts.taken + counts.skipped),
                f": {_LEFT_OVER}" if is_left_over else "",
            )
        loss = None if self._has_told_of_loss else known.last_loss()
        if loss is not None and (loss.is_cpu or row >= _EACH) and _is_bad(loss):
            self._has_told_of_loss = True
            logger.warning(
                "The loss is inf or NaN before it is scaled: the forward makes it, and no loss "
                "scale cures it. To see where: ampatch run --debug SCRIPT, or "
                "ampatch.debug(model)."
            )
        if row >= known.max_skips > row - new and is_left_over:
            logger.error(
                "%d steps of %s in a row were skipped. The last one had finite new gradients, but "
                "%s. First such gradients: %s.",
                *(row, self._name, _LEFT_OVER, self._offenders(known.names())),
            )
        elif row >= known.max_skips > row - new:
            logger.error(
                "%d steps of %s in a row were skipped because gradients held inf or NaN. First "
                "such gradients: %s. If ampatch.loss_scale() is already small, the scale is not "
                "the cause: look for a NaN in the data, the loss or the weights, or try "
                'dtype=torch.bfloat16, overrides={"path.*": "float"} for these modules, '
                'opt_level="O0" or a lower learning rate.',
                *(row, self._name, self._offenders(known.names())),
            )

    def _offenders(self, names: dict[int, str]) -> str:
        bad = [
            names.get(id(param), place)
            for place, param in self._placed()
            if param.grad is not None and not bool(torch.isfinite(values(param.grad)).all())
        ]
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        return (
            ", ".join(bad[:_SHOWN]) + more
        ) or "none here now (zeroed since, or on another rank)"

    def _warn_without_block(self) -> None:
        """The step came without `scale_loss`, under a dynamic scale; said once.

        A step at a learning rate of zero, by which libraries make an optimizer's state, trains
        nothing.
        """
        groups = self._optimizer.param_groups
        if not self._gradients.has_gradients() or all(group.get("lr") == 0 for group in groups):
            return
        self._has_warned = True
        logger.warning(
            "%s.step() without an ampatch.scale_loss block since its last step, under a dynamic "
            "loss scale: small gradients may be lost, and an overflow is not detected. Write "
            "'with ampatch.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()' "
            "before each step.",
            self._name,
        )

    def _warn_of_new_half(self, known: Known) -> None:
        """Name parameters that have become half since `initialize`, and not by a level."""
        if not (found := self._made_half()):
            return
        names, converted = known.names(), known.converted()
        for place, param in found:
            if id(param) not in converted:
                logger.warning(
                    "%s: %s, of shape %s, was FP32 and is %s now: the script replaced its .data "
                    "(some losses cast their weight to the dtype of their inputs). The weight "
                    "has no FP32 master weight any more, so small updates are lost. Give that "
                    "code FP32 inputs (embeddings.float()), or let it compute with "
                    "weight.to(x.dtype).",
                    *(self._name, names.get(id(param), place), tuple(param.shape), param.dtype),
                )

    def _made_half(self) -> list[tuple[str, Tensor]]:
        """Parameters that were FP32 at the first look and are half, and where; each once."""
        found = []
        for place, param in self._placed():
            first = self._first_dtypes.setdefault(id(param), param.dtype)
            if first is torch.float32 and param.dtype in HALF_TYPES and param.requires_grad:
                self._first_dtypes[id(param)] = param.dtype
                found.append((place, param))
        return found

    def _placed(self) -> list[tuple[str, Tensor]]:
        return [
            (f"param_groups[{number}]['params'][{index}]", param)
            for number, group in enumerate(self._optimizer.param_groups)
            for index, param in enumerate(group["params"])
        ]


def _is_bad(loss: Tensor) -> bool:
    """Whether it holds inf or NaN; read so that memory of the host makes no wait."""
    return not torch.isfinite(values(loss)).all().tolist()
