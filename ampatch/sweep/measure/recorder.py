"""The observer that records a script's training in the trial's process."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

import ampatch
from ampatch.device_figures import device_name
from ampatch.errors import AmpatchError
from ampatch.launch.script import EnoughSteps
from ampatch.sweep.measure.machine import load_average, machine_conditions
from ampatch.sweep.measure.readings import Readings, Track, peak_memory
from ampatch.sweep.measure.run_record import Measured
from ampatch.sweep.measure.step_times import StepTimes
from ampatch.torch_private.devices import can_read_without_sync

REPORT_EVERY = 0.5  # seconds


class Recorder:
    """An observer for `ampatch.observe` that collects a `Measured`.

    `report(steps, loss)` is called about twice a second, to show progress.  The script is ended
    when an optimizer has taken `steps` steps.
    """

    def __init__(
        self, report: Callable[[int, float | None], None], steps: int | None = None
    ) -> None:
        self._report = report
        self._steps = steps
        self._machine = machine_conditions()
        self._started = time.monotonic()
        self._reported = 0.0
        self.num_notices = 0  # number of calls about sessions, steps and metrics
        self._properties: Any = None
        self._training_without_ampatch: tuple[str, dict[str, Any]] | None = None
        self._skipped = Readings()
        self._count = 0
        self._pauses = 0
        self._times = StepTimes()
        self._losses: dict[str, Track] = defaultdict(Track)
        self._metrics: dict[str, Track] = defaultdict(Track)
        self._scales: dict[str, Track] = defaultdict(Track)
        self._loss_scale: float | None = None
        self._device: torch.device | None = None
        self._last_optimizer: Any = None  # this reference keeps its session open
        self._stopped_at: int | None = None

    def on_initialize(self, properties: Any) -> None:
        self.num_notices += 1
        self._properties = properties

    def on_training_without_ampatch(self, level: str, properties: dict[str, Any]) -> None:
        """The script trains at O0 without AMP code, or under autocast."""
        self._training_without_ampatch = level, properties

    def on_loss(self, loss: Any, loss_id: int = 0) -> None:
        self._losses[str(loss_id)].add(self._count, loss)

    def on_scale(self, scale: Any, loss_id: int = 0) -> None:
        self._scales[str(loss_id)].add(self._count, scale)

    def on_step(self, optimizer: Any, skipped: Any) -> None:
        self.num_notices += 1
        self._last_optimizer = optimizer
        params = (param for group in optimizer.param_groups for param in group["params"])
        device = next((param.device for param in params), torch.device("cpu"))
        self._device = device
        steps = self._times.record_step_end(id(optimizer), device, self._pauses)
        self._count += 1
        self._skipped.add(skipped)
        if can_read_without_sync(device):  # on other devices this read would wait for the device
            self._loss_scale = self._current_scale()
        self._show_progress()
        # It becomes None again if the script catches the exception and goes on.
        self._stopped_at = self._steps if steps == self._steps else None
        if self._stopped_at is not None:
            raise EnoughSteps

    def on_metrics(self, values: dict[str, float]) -> None:
        """Record metrics; the script has just evaluated, which is a pause in its training."""
        self.num_notices += 1
        self._pauses += bool(values)
        for name, value in values.items():
            self._metrics[name].add(self._count, value)

    def measured(self) -> Measured:
        """Everything measured so far; waits for the device."""
        memory_bytes, memory_kind = peak_memory()
        level, properties = self._training_without_ampatch or (
            getattr(self._properties, "opt_level", None),
            vars(self._properties) if self._properties else {},
        )
        return Measured(
            opt_level=level, properties={key: str(value) for key, value in properties.items()},
            skipped=[bool(value) for value in self._skipped.read()],
            **self._times.of_main_optimizer(),
            losses={key: track.series(self._started) for key, track in self._losses.items()},
            metrics={key: track.series(self._started) for key, track in self._metrics.items()},
            loss_scales={key: track.changes(self._started) for key, track in self._scales.items()},
            loss_scale=self._loss_scale if (scale := self._current_scale()) is None else scale,
            device=self._device and device_name(self._device), memory_bytes=memory_bytes,
            memory_kind=memory_kind, stopped_at=self._stopped_at,
            machine={**self._machine, **load_average("load_at_end")},
        )  # fmt: skip

    def _current_scale(self) -> float | None:
        try:
            return ampatch.loss_scale()
        except AmpatchError:  # no session is open
            return None

    def _show_progress(self) -> None:
        now = time.monotonic()
        if now - self._reported >= REPORT_EVERY:
            self._reported = now
            losses = next(iter(self._losses.values()), None)
            self._report(self._count, losses.readings.latest if losses else None)
