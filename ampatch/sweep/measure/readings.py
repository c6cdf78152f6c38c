"""Readings of numbers and memory that do not wait for the device.

Values on a device are kept as small tensors and read in batches, long after the step.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ampatch import device_figures
from ampatch.sweep.measure.run_record import Series

BATCH = 512  # number of values that are left on the device before they are read


class Readings:
    """Numbers in the order of `add`."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._on_device: list[torch.Tensor] = []

    def add(self, value: Any) -> None:
        """Add a number or a tensor; of a tensor with more than one element, the mean."""
        if isinstance(value, torch.Tensor):
            value = value.detach().double().mean() if value.numel() != 1 else value.detach()
            if not value.is_cpu:
                # A clone, because the script may change the tensor in place.
                self._on_device.append(value.clone())
                if len(self._on_device) >= BATCH:
                    self.read()
                return
        self.read().append(float(value))

    def read(self) -> list[float]:
        """All numbers; waits for the device."""
        self._values += [float(value) for value in self._on_device]
        self._on_device.clear()
        return self._values

    @property
    def latest(self) -> float | None:
        """The last number; None if there is none, or if reading it would wait for a device."""
        return self._values[-1] if self._values and not self._on_device else None


@dataclass
class Track:
    """Readings, each with the number of optimizer steps before it and its time."""

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    readings: Readings = field(default_factory=Readings)

    def add(self, step: int, value: Any) -> None:
        self.steps.append(step)
        self.seconds.append(time.monotonic())
        self.readings.add(value)

    def series(self, since: float = 0.0) -> Series:
        """All readings, with `seconds` since `since`, a time of `time.monotonic`."""
        seconds = [moment - since for moment in self.seconds]
        return Series(list(self.steps), list(self.readings.read()), seconds)

    def changes(self, since: float = 0.0) -> Series:
        """The readings that differ from the reading before them."""
        series = self.series(since)
        kept = [
            index
            for index, value in enumerate(series.values)
            if index == 0 or value != series.values[index - 1]
        ]
        columns = series.steps, series.values, series.seconds
        return Series(*([column[index] for index in kept] for column in columns))


def peak_memory() -> tuple[int | None, str]:
    """The peak memory of this process in bytes, and its kind: "device" or "resident".

    On an accelerator it is what PyTorch allocated on all devices together.  On a CPU, and if
    PyTorch does not count, it is the resident set: from /proc if it exists, because `ru_maxrss` of
    a child starts at the peak of its parent.  Pages of files (code of libraries) in /proc do not
    count, because a forked process has fewer of them.
    """
    on_devices = device_figures.peak_memory()
    if on_devices is not None:
        return on_devices, "device"
    status = Path("/proc/self/status")
    if status.exists():
        kibibytes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", status.read_text(), re.M))
        if {"VmHWM", "RssFile"} <= kibibytes.keys():
            return (int(kibibytes["VmHWM"]) - int(kibibytes["RssFile"])) * 1024, "resident"
    return _peak_by_resource(), "resident"


def _peak_by_resource() -> int | None:
    """`ru_maxrss` in bytes: macOS counts in bytes, others in KiB, Windows not at all."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
