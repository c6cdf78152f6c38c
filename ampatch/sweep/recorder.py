"""The observer that watches a script's training from inside the child."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

import ampatch
from ampatch.errors import AmpatchError
from ampatch.sweep.probes import Readings, Timeline, Track, peak_memory
from ampatch.sweep.record import Measured

REPORT_EVERY = 0.5  # seconds


class Recorder:
    """Gathers a `Measured` from the engine's notices."""

    def __init__(self, report: Callable[[int, float | None], None]) -> None:
        """`report(steps, loss)` is called now and then, to show progress."""
        self._report = report
        self._reported = 0.0
        self._properties: Any = None
        self._skipped = Readings()
        self._count = 0
        self._pauses = 0
        self._timelines: dict[int, Timeline] = {}
        self._losses: dict[str, Track] = defaultdict(Track)
        self._metrics: dict[str, Track] = defaultdict(Track)
        self._loss_scale: float | None = None
        self._device: torch.device | None = None
        self._in_use: Any = None  # the last optimizer: while it lives, its session does

    def on_initialize(self, properties: Any) -> None:
        self._properties = properties

    def on_loss(self, loss: Any, loss_id: int = 0) -> None:
        self._losses[str(loss_id)].add(self._count, loss)

    def on_step(self, optimizer: Any, skipped: Any) -> None:
        self._in_use = optimizer
        device = self._device = _device_of(optimizer)
        if id(optimizer) not in self._timelines:
            self._timelines[id(optimizer)] = Timeline(device)
        self._timelines[id(optimizer)].mark(self._pauses)
        self._count += 1
        self._skipped.add(skipped)
        if device.type == "cpu":  # elsewhere it would be a wait
            self._loss_scale = ampatch.loss_scale()
        self._show_progress()

    def on_metrics(self, values: dict[str, float]) -> None:
        """A script that reports metrics has just evaluated: a pause in its training."""
        self._pauses += 1
        for name, value in values.items():
            self._metrics[name].add(self._count, value)

    def measured(self) -> Measured:
        """Everything so far; waits for the device."""
        memory_bytes, memory_kind = peak_memory()
        return Measured(
            opt_level=getattr(self._properties, "opt_level", None),
            properties=_as_text(self._properties),
            skipped=[bool(value) for value in self._skipped.all()],
            step_seconds=self._step_seconds(),
            losses={name: track.series() for name, track in self._losses.items()},
            metrics={name: track.series() for name, track in self._metrics.items()},
            loss_scale=self._final_loss_scale(),
            device=_device_name(self._device),
            memory_bytes=memory_bytes,
            memory_kind=memory_kind,
        )

    def _step_seconds(self) -> list[float | None]:
        """Of the optimizer that stepped most: its step is the script's iteration."""
        if not self._timelines:
            return []
        return max(self._timelines.values(), key=len).seconds()

    def _final_loss_scale(self) -> float | None:
        """The scale now or, when the script has deactivated, the last one seen, if any."""
        try:
            return ampatch.loss_scale()
        except AmpatchError:  # no session is open any more
            return self._loss_scale

    def _show_progress(self) -> None:
        now = time.monotonic()
        if now - self._reported >= REPORT_EVERY:
            self._reported = now
            losses = next(iter(self._losses.values()), None)
            self._report(self._count, losses.readings.latest if losses else None)


def _device_of(optimizer: Any) -> torch.device:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            return parameter.device
    return torch.device("cpu")


def _device_name(device: torch.device | None) -> str | None:
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device and device.type


def _as_text(properties: Any) -> dict[str, str]:
    """The fields of `initialize`'s properties, for the file."""
    if properties is None:
        return {}
    fields = dataclasses.fields(properties)
    return {field.name: str(getattr(properties, field.name)) for field in fields}
