"""Steps of a framework: code around a half model that calls it, or parts of it.

Lightning's `training_step` is a method of the model and computes the loss too.  Under
DistributedDataParallel the framework sends it through the model's own `__call__`.  That call is
not the model's forward: nothing is to be cast around it, and the loss is to be in FP32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from .submodule_calls import SubmoduleCalls


class Step:
    """Context manager for one step.

    If `is_sent_through_call`, the model's first call in it is the step itself.
    """

    def __init__(
        self, parts: SubmoduleCalls, result: torch.dtype | None, is_sent_through_call: bool
    ) -> None:
        self._parts = parts
        self._result = result
        self._is_sent = is_sent_through_call
        self._calls: list[bool] = []  # that run now: whether it is the step

    def __enter__(self) -> None:
        self._before = self._parts.results_are(self._result)

    def __exit__(self, *exception: object) -> None:
        self._parts.results_are(self._before)

    def enters(self) -> bool:
        """The model is called; whether that is the step."""
        self._calls.append(self._is_sent)
        self._is_sent = False
        return self._calls[-1]

    def leaves(self) -> bool:
        """A call of the model ends; whether that was the step."""
        return bool(self._calls) and self._calls.pop()


class CompiledStep:
    """`step` as one compiled function: no hook of a part runs in it, so all weights are lent."""

    def __init__(
        self,
        step: AbstractContextManager[None],
        begin: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        self._step = step
        self._begin = begin
        self._end = end

    def __enter__(self) -> None:
        self._begin()
        self._step.__enter__()

    def __exit__(self, *exception: Any) -> bool | None:
        self._end()
        return self._step.__exit__(*exception)
