"""Watches the training of a script that does not call `initialize`.

The losses are the tensors on which `backward()` is called, divided by the scale of an enabled
GradScaler.  Every optimizer's steps count, and those that a GradScaler skips.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import ampatch
from ampatch.config.opt_levels import properties_for
from ampatch.session.facade import PatchSet
from ampatch.sweep.measure.recorder import Recorder


def record_auto_script(recorder: Recorder, settings: dict[str, Any]) -> None:
    """Report the training of a script under `ampatch.auto`, with its unscaled losses.

    `settings` has the opt level and the dtype of the environment.
    """
    PlainTraining(recorder, "").watch_losses()
    hooks = ("on_step", "on_scale", "on_metrics")  # `watch_losses` reports the losses
    ampatch.observe(SimpleNamespace(**{name: getattr(recorder, name) for name in hooks}))
    recorder.on_initialize(properties_for(settings["opt_level"], settings["dtype"]))


def record_losses_before_scale_loss(recorder: Recorder) -> None:
    """Report the losses of a script that calls `initialize`, up to its first `scale_loss`."""
    training = PlainTraining(recorder, "")
    training.watch_losses()
    ampatch.observe(SimpleNamespace(on_loss=lambda *_: training.mute()))


class PlainTraining:
    """Reports backward passes and steps to `recorder`, from `start` on.

    `name` is the level that is recorded.  `first_step` is called before the first step.
    """

    def __init__(
        self, recorder: Recorder, name: str, first_step: Callable[[Any], None] = lambda _: None
    ) -> None:
        self._recorder, self._name, self._first_step = recorder, name, first_step
        self._patches = PatchSet()
        self._is_muted = False
        self._hooks: list[Any] = []
        self._steps = 0
        self._framework_loss: Any = None
        self._scaled_losses = 0  # scaled since the last step, without a backward pass yet
        self._scale: Any = None  # scale of the last GradScaler that scaled

    def start(self) -> None:
        """Report backward passes, scales and steps."""
        self.watch_losses()
        self._patches.replace(torch.amp.GradScaler, "scale", self._recording_scale)
        self._patches.replace(torch.amp.GradScaler, "step", self._recording_skips)
        self._hooks = [
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]

    @contextlib.contextmanager
    def framework_backward(self, loss: Any) -> Iterator[None]:
        """Context manager for a backward pass of this loss, which a framework divides or scales."""
        self._framework_loss = loss
        try:
            yield
        finally:
            self._framework_loss = None

    def watch_losses(self) -> None:
        """Report backward passes only."""
        self._patches.replace(torch.autograd, "backward", self._recording_losses)

    def mute(self) -> None:
        """Stop reporting.  The patches stay, because a session may have wrapped them."""
        self._is_muted = True
        for hook in self._hooks:
            hook.remove()

    def _recording_losses(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            first = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
            if not self._is_muted:
                self._recorder.on_loss(self._before_scaling(first))
            return original(tensors, *args, **kwargs)

        return backward

    def _before_scaling(self, root: Any) -> Any:
        """The loss from which `root` was computed."""
        if self._framework_loss is not None:
            return self._framework_loss
        if not self._scaled_losses:
            return root
        self._scaled_losses -= 1
        return root.detach() / self._scale

    def _recording_scale(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            result = original(scaler, outputs)
            scaled = [result] if isinstance(result, Tensor) else result
            if (
                not self._is_muted
                and scaler.is_enabled()
                and scaled
                and isinstance(scaled, (list, tuple))
            ):
                self._scaled_losses += len(scaled)
                self._scale = original(scaler, torch.ones((), device=scaled[0].device))
                self._recorder.on_scale(self._scale)
            return result

        return scale

    def _recording_skips(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._steps
            result = original(scaler, optimizer, *args, **kwargs)
            if self._steps == before and scaler.is_enabled() and not self._is_muted:
                self._step_begins(optimizer)
                self._recorder.on_step(optimizer, True)
            return result

        return step

    def _step_begins(self, optimizer: Any, *_: Any) -> None:
        if not self._steps:
            self._first_step(optimizer)
            self._recorder.on_training_without_ampatch(self._name, {})
        self._steps += 1
        self._scaled_losses = 0

    def _step_ends(self, optimizer: Any, *_: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)  # set if the optimizer's kernel skips
        self._recorder.on_step(optimizer, found_inf is not None and found_inf.clone())
