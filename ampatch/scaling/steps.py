"""The steps that an optimizer took and skipped: their counts, and messages about them.

For most optimizers, the host decides whether to step.  For fused optimizers, the kernels decide on
the device, and the steps are counted there without a host sync.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..config.opt_levels import HALF_DTYPES
from ..log import logger
from ..torch_private import foreach
from ..torch_private.devices import AsyncCopy, is_stream_capturing
from .gradients import OptimizerGradients
from .unscaling import real_values

_MAX_NAMES_SHOWN = 5  # the maximum number of parameters that a message names
_MANY_SKIPS = 10  # from this number of skips in a row on, only each doubling is logged
_LEFT_OVER_MESSAGE = (
    "gradients of an earlier overflow are still in p.grad; call optimizer.zero_grad() after each "
    "step, also after a skipped one"
)


class StepCounts(NamedTuple):
    """The numbers of steps of one optimizer since `initialize`."""

    taken: int
    skipped: int
    skipped_in_a_row: int


class StepCounter:
    """Counts the steps of one optimizer, on the host until `record` gets a tensor."""

    def __init__(self) -> None:
        self._num_taken = self._num_skipped = self._num_in_a_row = 0  # the counts on the host
        # The counts on a device: all steps, skipped steps, steps skipped in a row.
        self._device_counts: Tensor | None = None
        self._device_elements: list[Tensor] = []  # the same counts, as three 0-dim tensors
        self._host_copy: AsyncCopy | None = None
        self._steps_since_copy = 0  # the number of steps since the last copy
        self._reported_skips = 0  # the number of skipped steps that `take_unreported` has returned

    def record(self, skipped: bool | Tensor) -> None:
        """Count a step, without a host sync.  `skipped` may be a 0-dim tensor, 1 if skipped."""
        if isinstance(skipped, Tensor):
            self._record_on_device(skipped)
        elif self._device_counts is not None:
            self._record_on_device(torch.full_like(self._device_elements[0], float(skipped)))
        elif skipped:
            self._num_skipped += 1
            self._num_in_a_row += 1
        else:
            self._num_taken += 1
            self._num_in_a_row = 0

    def _record_on_device(self, skipped: Tensor) -> None:
        if self._device_counts is None:
            self._device_counts = skipped.new_empty(3)
            self._device_elements = list(self._device_counts.unbind())
            counts = (self._num_taken + self._num_skipped, self._num_skipped, self._num_in_a_row)
            for element, count in zip(self._device_elements, counts, strict=True):
                element.fill_(float(count))
        steps, skips, in_a_row = self._device_elements
        skipped = skipped.to(steps.device)
        foreach.add_([steps, skips], [torch.ones_like(skipped), skipped])
        torch.addcmul(skipped, in_a_row, skipped, out=in_a_row)  # in_a_row + 1, or 0

    def read(self) -> StepCounts:
        """The counts.  Synchronizes with the device if the counts are on a device."""
        if self._device_counts is None:
            return StepCounts(self._num_taken, self._num_skipped, self._num_in_a_row)
        return _counts(self._device_counts.tolist())

    def take_unreported(self, max_consecutive_skips: int) -> tuple[StepCounts, int] | None:
        """The counts, and how many steps were skipped since the last call.

        Returns None if no step was skipped, or if the counts are not on the host yet: counts on a
        device are copied every `max_consecutive_skips // 4` steps, and read when they have arrived.
        """
        if self._device_counts is None and self._num_skipped == self._reported_skips:
            return None
        if self._device_counts is None:
            counts: StepCounts | None = self.read()
        else:
            counts = self._read_copy(self._device_counts, max_consecutive_skips // 4)
        if counts is None or counts.skipped == self._reported_skips:
            return None
        new = counts.skipped - self._reported_skips
        self._reported_skips = counts.skipped
        return counts, new

    def _read_copy(self, on_device: Tensor, interval: int) -> StepCounts | None:
        self._steps_since_copy += 1
        if is_stream_capturing(on_device):
            return None
        if self._host_copy is None and self._steps_since_copy >= interval:
            self._host_copy = AsyncCopy(on_device)
            self._steps_since_copy = 0
        if self._host_copy is None or (values := self._host_copy.value()) is None:
            return None
        self._host_copy = None
        return _counts(values)


def _counts(values: list[float]) -> StepCounts:
    steps, skipped, in_a_row = map(int, values)
    return StepCounts(steps - skipped, skipped, in_a_row)


class SessionForReports(Protocol):
    """The part of a session that the messages about steps use."""

    max_consecutive_skips: int  # this number of skips in a row is logged as an error
    last_loss: Callable[[], Tensor | None]  # returns the loss of the last block if it still exists

    @property
    def requires_scale_loss_blocks(self) -> bool:
        """Whether to warn about a step without a `scale_loss` block before it."""

    def parameter_names(self) -> dict[int, str]:
        """Module paths of the models' parameters, by ids of the parameters."""

    def converted_ids(self) -> set[int]:
        """Ids of the parameters that an opt level has made half."""


class StepReports:
    """Logs the messages about the steps of one optimizer."""

    def __init__(self, optimizer: Any, gradients: OptimizerGradients, counter: StepCounter) -> None:
        self._optimizer = optimizer
        self._name = type(optimizer).__name__
        self._gradients = gradients
        self._counter = counter
        self._has_warned_of_no_block = False
        self._has_warned_of_loss = False
        self._steps = 0
        self._first_dtypes: dict[int, torch.dtype] = {}  # by the id of the parameter

    def record_dtypes(self) -> None:
        """Record the dtypes that parameters have now."""
        self._update_dtypes()

    def after_step(self, session: SessionForReports) -> None:
        """Log the messages about the step that has ended."""
        unreported = self._counter.take_unreported(session.max_consecutive_skips)
        if unreported is not None:
            self._log_skipped(*unreported, session)
        if (
            not (self._gradients.had_block or self._has_warned_of_no_block)
            and session.requires_scale_loss_blocks
        ):
            self._warn_without_block()
        self._steps += 1
        if not self._steps & (self._steps - 1):  # after 1, 2, 4, 8, ...
            self._warn_of_new_half(session)

    def _log_skipped(self, counts: StepCounts, new: int, session: SessionForReports) -> None:
        """Log that `new` more steps were skipped; from ten in a row on, only at each doubling.

        Logging the error about `max_consecutive_skips` skips in a row synchronizes with the device.
        Reading a loss on an accelerator synchronizes too, so a loss is read there only after ten
        skips in a row, when training has stalled anyway.
        """
        streak = counts.skipped_in_a_row
        is_left_over = streak > 1 and self._gradients.overflow_is_left_over()
        steps = "a step" if new == 1 else f"{new} steps"
        if streak >= _MANY_SKIPS:
            steps = f"{streak} steps in a row"
        before = max(0, streak - new)
        if (
            streak < _MANY_SKIPS
            or (streak // _MANY_SKIPS).bit_length() > (before // _MANY_SKIPS).bit_length()
        ):
            logger.info(
                "Gradient overflow: %s skipped %s (%d of %d since initialize)%s.",
                self._name,
                steps,
                counts.skipped,
                counts.taken + counts.skipped,
                f": {_LEFT_OVER_MESSAGE}" if is_left_over else "",
            )
        loss = None if self._has_warned_of_loss else session.last_loss()
        if loss is not None and (loss.is_cpu or streak >= _MANY_SKIPS) and _is_not_finite(loss):
            self._has_warned_of_loss = True
            logger.warning(
                "The loss is inf or NaN before it is scaled. The forward pass produces it, so "
                "changing the loss scale does not help. To see where: ampatch run --debug SCRIPT, "
                "or ampatch.debug(model)."
            )
        if streak >= session.max_consecutive_skips > streak - new and is_left_over:
            logger.error(
                "%d steps of %s in a row were skipped. The last one had finite new gradients, but "
                "%s. First such gradients: %s.",
                streak,
                self._name,
                _LEFT_OVER_MESSAGE,
                self._nonfinite_grads(session.parameter_names()),
            )
        elif streak >= session.max_consecutive_skips > streak - new:
            logger.error(
                "%d steps of %s in a row were skipped because gradients held inf or NaN. First "
                "such gradients: %s. If ampatch.loss_scale() is already small, the scale is not "
                "the cause: look for a NaN in the data, the loss or the weights, or try "
                'dtype=torch.bfloat16, overrides={"path.*": "float"} for these modules, '
                'opt_level="O0" or a lower learning rate.',
                streak,
                self._name,
                self._nonfinite_grads(session.parameter_names()),
            )

    def _nonfinite_grads(self, names: dict[int, str]) -> str:
        bad = [
            names.get(id(param), path)
            for path, param in self._params_with_paths()
            if param.grad is not None and not bool(torch.isfinite(real_values(param.grad)).all())
        ]
        more = f" and {len(bad) - _MAX_NAMES_SHOWN} more" if len(bad) > _MAX_NAMES_SHOWN else ""
        return (
            ", ".join(bad[:_MAX_NAMES_SHOWN]) + more
        ) or "none on this rank now (they were zeroed, or are on another rank)"

    def _warn_without_block(self) -> None:
        """Warn once about a step without `scale_loss` under a dynamic scale.

        A step at learning rate 0 gets no warning, because libraries use such a step to create
        optimizer states.
        """
        groups = self._optimizer.param_groups
        if not self._gradients.has_gradients() or all(group.get("lr") == 0 for group in groups):
            return
        self._has_warned_of_no_block = True
        logger.warning(
            "%s.step() without an ampatch.scale_loss block since its last step, under a dynamic "
            "loss scale: small gradients may be lost, and an overflow is not detected. Write "
            "'with ampatch.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()' "
            "before each step.",
            self._name,
        )

    def _warn_of_new_half(self, session: SessionForReports) -> None:
        """Warn about parameters that became half after `initialize`, except by an opt level."""
        if not (params := self._update_dtypes()):
            return
        names = session.parameter_names()
        converted = session.converted_ids()
        for path, param in params:
            if id(param) not in converted:
                logger.warning(
                    "%s: %s, of shape %s, was FP32 and is %s now: the script replaced its .data "
                    "(some losses cast their weight to the dtype of their inputs). The weight "
                    "no longer has an FP32 master weight, so small updates are lost. Give that "
                    "code FP32 inputs (embeddings.float()), or let it compute with "
                    "weight.to(x.dtype).",
                    self._name,
                    names.get(id(param), path),
                    tuple(param.shape),
                    param.dtype,
                )

    def _update_dtypes(self) -> list[tuple[str, Tensor]]:
        """Record dtypes.  Returns parameters, with paths, that became half since the last call."""
        params = []
        for path, param in self._params_with_paths():
            first = self._first_dtypes.setdefault(id(param), param.dtype)
            if first is torch.float32 and param.dtype in HALF_DTYPES and param.requires_grad:
                self._first_dtypes[id(param)] = param.dtype
                params.append((path, param))
        return params

    def _params_with_paths(self) -> list[tuple[str, Tensor]]:
        return [
            (f"param_groups[{number}]['params'][{index}]", param)
            for number, group in enumerate(self._optimizer.param_groups)
            for index, param in enumerate(group["params"])
        ]


def _is_not_finite(loss: Tensor) -> bool:
    """Whether a loss is inf or NaN.  Synchronizes with the loss's device."""
    return not torch.isfinite(real_values(loss)).all().tolist()
