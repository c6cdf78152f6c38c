"""The speed of the half dtypes on this machine, with a verdict for each operation.

Each round times FP32, the half dtypes and FP32 again, directly after each other.  Other processes
make calls longer, never shorter, and seldom in all rounds.  So the time of a dtype is the time of
its shortest call, and a speed is the ratio of two such times.  After `MIN_ROUNDS`, rounds continue
until FP32 agrees with itself, or for `MAX_SECONDS`.  The range comes from the speeds of each third
of the rounds.  A CPU is measured on one thread, because several threads wait for each other on busy
cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import ampatch
from ampatch.device_figures import synchronize
from ampatch.torch_private.devices import can_read_without_sync, device_types

from .tensors import dtype_name

MIN_ROUNDS = 12
MAX_SECONDS = 1.0  # no round after `MIN_ROUNDS` begins later than this
MAX_FP32_DIFFERENCE = 0.03  # the largest difference between FP32's two timings, in each third
TIE_MARGIN = 0.1  # a difference below 10 % is a tie
CLEARLY_SLOW_RATIO = 5  # a dtype that takes this many times as long as FP32 has only three rounds
SMALLEST_SHOWN = 0.1  # lower speeds are shown as "under 0.1x"
HALF_DTYPES = (torch.float16, torch.bfloat16)
_THIRDS = 3
_CALLS_IN_ROUND = 3  # calls of each dtype in a round


@dataclasses.dataclass(frozen=True)
class Speed:
    """An operation's speed in `dtype` relative to FP32, with the range over thirds of the rounds.

    For FP32 it is the second timing of each round relative to the first: the noise.
    """

    operation: str
    dtype: torch.dtype
    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """ "faster", "slower" or "tie"."""
        if self.ratio > 1 + TIE_MARGIN and self.low > 1:
            return "faster"
        if self.ratio < 1 - TIE_MARGIN and self.high < 1:
            return "slower"
        return "tie"

    @property
    def name(self) -> str:
        """The dtype's name."""
        return dtype_name(self.dtype)

    def figure(self) -> str:
        """The ratio and its range as text, or "under 0.1x"."""
        if self.high < SMALLEST_SHOWN:
            return f"under {SMALLEST_SHOWN:g}x"
        return f"{self.ratio:.2f}x ({self.low:.2f} to {self.high:.2f})"

    def as_dict(self) -> dict[str, Any]:
        """Ratio, range and verdict, for JSON."""
        figures = {"ratio": self.ratio, "low": self.low, "high": self.high}
        return {**figures, "verdict": self.verdict}


@dataclasses.dataclass(frozen=True)
class HalfSpeeds:
    """The half dtypes on a device, by their names.

    `fast` are faster than FP32 in some operation and slower in none.  `lowest` and `highest` have
    for each dtype its speed relative to FP32 in its slowest and fastest operation.
    """

    fast: Sequence[str]
    lowest: dict[str, float]
    highest: dict[str, float]


def half_speeds(device: str | None = None) -> HalfSpeeds:
    """Measure the half dtypes on a device; takes a few seconds.

    `device` is "cpu" or the type of an accelerator; None means the accelerator, or the CPU without
    one.
    """
    speeds = measure_speeds(device or device_types()[-1])
    ratios = {dtype_name(t): [s.ratio for s in speeds if s.dtype is t] for t in HALF_DTYPES}
    lowest, highest = ({n: choose(values) for n, values in ratios.items()} for choose in (min, max))
    return HalfSpeeds(faster_dtypes(speeds), lowest, highest)


def faster_dtypes(speeds: list[Speed]) -> tuple[str, ...]:
    """Names of the half dtypes that are faster in some operation, and slower in none."""
    verdicts = {dtype_name(t): {s.verdict for s in speeds if s.dtype is t} for t in HALF_DTYPES}
    return tuple(
        n for n, of_dtype in verdicts.items() if "faster" in of_dtype and "slower" not in of_dtype
    )


def measure_speeds(device: str) -> list[Speed]:
    """Speeds of a matmul and a convolution, with their backward passes, in each dtype."""
    with ampatch.disable_casts(), _one_thread():
        dtypes = (torch.float32, *HALF_DTYPES)
        runs = {dtype: operations(device, dtype) for dtype in dtypes}
        return [
            speed
            for name in runs[torch.float32]
            for speed in _speeds(name, {dtype: runs[dtype][name] for dtype in dtypes}, device)
        ]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _speeds(name: str, runs: dict[torch.dtype, Callable[[], Any]], device: str) -> list[Speed]:
    times = _Times({dtype: [] for dtype in runs}, [])
    for run in runs.values():
        _shortest_time(run, device, 1)  # the first call sets things up
    end = time.perf_counter() + MAX_SECONDS
    while len(times.fp32_again) < MIN_ROUNDS or not (times.agree() or time.perf_counter() > end):
        for dtype, seconds in times.by_dtype.items():
            if len(seconds) < _THIRDS or not times.is_clearly_slow(dtype):
                seconds.append(_shortest_time(runs[dtype], device, _CALLS_IN_ROUND))
        times.fp32_again.append(_shortest_time(runs[torch.float32], device, _CALLS_IN_ROUND))
    return [Speed(name, dtype, *times.ratios(dtype)) for dtype in runs]


@dataclasses.dataclass
class _Times:
    """The shortest times of each round by dtype, and those of FP32 at the end of each round."""

    by_dtype: dict[torch.dtype, list[float]]
    fp32_again: list[float]

    def ratios(self, dtype: torch.dtype) -> tuple[float, float, float]:
        """FP32's time over that of `dtype`: of all rounds; the lowest and highest of thirds."""
        thirds = [self._ratio(dtype, slice(third, None, _THIRDS)) for third in range(_THIRDS)]
        return self._ratio(dtype, slice(None)), min(thirds), max(thirds)

    def agree(self) -> bool:
        """Whether FP32 is as fast as itself in each third of the rounds."""
        _, low, high = self.ratios(torch.float32)
        return 1 - MAX_FP32_DIFFERENCE < low and high < 1 + MAX_FP32_DIFFERENCE

    def is_clearly_slow(self, dtype: torch.dtype) -> bool:
        return min(self.by_dtype[dtype]) > CLEARLY_SLOW_RATIO * min(self.by_dtype[torch.float32])

    def _ratio(self, dtype: torch.dtype, rounds: slice) -> float:
        first, fp32_again = min(self.by_dtype[torch.float32][rounds]), min(self.fp32_again[rounds])
        if dtype is torch.float32:
            return first / fp32_again
        return min(first, fp32_again) / min(self.by_dtype[dtype][rounds])


def operations(device: str, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """A function for each operation by name, that runs its forward and backward."""

    def leaf(*shape: int) -> Any:
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    small, large = (256, 4, 64), (4096, 128, 64)
    side, batch, channels = small if can_read_without_sync(torch.device(device)) else large
    matmul = leaf(side, side), leaf(side, side)
    conv = leaf(batch, channels, 16, 16), leaf(channels, channels, 3, 3)
    return {
        "matmul": _training_call(torch.matmul, matmul),
        "conv2d": _training_call(functools.partial(torch.nn.functional.conv2d, padding=1), conv),
    }


def _training_call(function: Callable[..., Any], inputs: tuple) -> Callable[[], Any]:
    result = function(*inputs)
    grad = torch.ones_like(result)
    return lambda: torch.autograd.grad(function(*inputs), inputs, grad)


def _shortest_time(run: Callable[[], Any], device: str, calls: int) -> float:
    """The shortest time of this number of calls of `run`."""
    best = float("inf")
    for _ in range(calls):
        start = time.perf_counter()
        run()
        synchronize(torch.device(device))
        best = min(best, time.perf_counter() - start)
    return best
