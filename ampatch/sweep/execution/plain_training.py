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


def watch_automatic(recorder: Recorder, asked: dict[str, Any]) -> None:
    """Report a script that `ampatch.auto` trains: its losses from before they are scaled."""
    PlainTraining(recorder, "").watch_losses()
    but_losses = ("on_step", "on_scale", "on_metrics")
    ampatch.observe(SimpleNamespace(**{name: getattr(recorder, name) for name in but_losses}))
    recorder.on_initialize(properties_for(asked["opt_level"], asked["dtype"]))


def watch_unscaled(recorder: Recorder) -> None:
    """Report the losses of a script that calls `initialize`, up to its first `scale_loss`."""
    plain = PlainTraining(recorder, "")
    plain.watch_losses()
    ampatch.observe(SimpleNamespace(on_loss=lambda *_: plain.mute()))


class PlainTraining:
    """Reports backward passes and steps to `recorder`, from `start` on.

    `name` is what the training is called in the record.  `first_step` is called before the first.
    """

    def __init__(
        self, recorder: Recorder, name: str, first_step: Callable[[Any], None] = lambda _: None
    ) -> None:
        self._recorder, self._name, self._first_step = recorder, name, first_step
        self._patches = PatchSet()
        self._is_over = False
        self._hooks: list[Any] = []
        self._steps = 0
        self._loss_inside: Any = None
        self._waiting = 0  # scaled losses without a backward pass since the last step
        self._scale: Any = None  # set by the last GradScaler that scaled

    def start(self) -> None:
        """Report backward passes, scales and steps."""
        self.watch_losses()
        self._patches.replace(torch.amp.GradScaler, "scale", self._remembering)
        self._patches.replace(torch.amp.GradScaler, "step", self._noting_skips)
        self._hooks = [
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]

    @contextlib.contextmanager
    def inside(self, loss: Any) -> Iterator[None]:
        """A backward pass of this loss, which a framework divides or scales first."""
        self._loss_inside = loss
        try:
            yield
        finally:
            self._loss_inside = None

    def watch_losses(self) -> None:
        """Report the backward passes alone."""
        self._patches.replace(torch.autograd, "backward", self._reporting)

    def mute(self) -> None:
        """Report nothing more; the patches stay, as a session may have put its own around them."""
        self._is_over = True
        for hook in self._hooks:
            hook.remove()

    def _reporting(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            first = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
            if not self._is_over:
                self._recorder.on_loss(self._before_scaling(first))
            return original(tensors, *args, **kwargs)

        return backward

    def _before_scaling(self, root: Any) -> Any:
        """The loss of which `root` was made."""
        if self._loss_inside is not None:
            return self._loss_inside
        if not self._waiting:
            return root
        self._waiting -= 1
        return root.detach() / self._scale

    def _remembering(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            result = original(scaler, outputs)
            scaled = [result] if isinstance(result, Tensor) else result
            if (
                not self._is_over
                and scaler.is_enabled()
                and scaled
                and isinstance(scaled, (list, tuple))
            ):
                self._waiting += len(scaled)
                self._scale = original(scaler, torch.ones((), device=scaled[0].device))
                self._recorder.on_scale(self._scale)
            return result

        return scale

    def _noting_skips(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._steps
            result = original(scaler, optimizer, *args, **kwargs)
            if self._steps == before and scaler.is_enabled() and not self._is_over:
                self._step_begins(optimizer)
                self._recorder.on_step(optimizer, True)
            return result

        return step

    def _step_begins(self, optimizer: Any, *_: Any) -> None:
        if not self._steps:
            self._first_step(optimizer)
            self._recorder.on_engine(self._name, {})
        self._steps += 1
        self._waiting = 0

    def _step_ends(self, optimizer: Any, *_: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)  # where the optimizer's kernel skips
        self._recorder.on_step(optimizer, found_inf is not None and found_inf.clone())
