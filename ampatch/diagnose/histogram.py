"""Gradients by binary exponent, and what they become in float16.

See section 3.2 of Micikevicius et al. 2018, "Mixed Precision Training"
(arXiv 1710.03740): gradients below float16's range become zero, and a loss scale
moves them into it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

LARGEST = 65504.0
"""float16's largest number."""

SMALLEST_NORMAL = -14
SMALLEST = -24
"""Exponents of float16's smallest normal and subnormal numbers."""

_FLUSHED_EXP = -25  # 2**-25 lies halfway between 0 and 2**-24, and rounds to 0
_LOWEST_EXP = -149  # the exponent of FP32's smallest positive number
_BINS = 128 - _LOWEST_EXP + 1
_KINDS = ("zero", "not finite", "flushed", "subnormal", "flushed now", "subnormal now", "over now")


class Counts:
    """Counts of gradients on their device; `read` copies the counts to the host."""

    def __init__(self) -> None:
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None  # bins, kinds, largest

    def add(self, gradient: Tensor, scale: float) -> None:
        """Count a gradient's elements; `scale` is the loss scale they were computed at."""
        sizes = gradient.detach().abs().float().flatten()
        is_finite = torch.isfinite(sizes)
        finite = sizes[is_finite]
        sizes = finite[finite > 0]
        mantissa, exponent = torch.frexp(sizes)
        bins = torch.bincount(exponent - (mantissa == 0.5).int() - _LOWEST_EXP, minlength=_BINS)
        kinds = torch.stack(
            [
                finite.numel() - (finite > 0).sum(),
                (~is_finite).sum(),
                *_count_in_float16(sizes)[:2],
                *_count_in_float16(sizes * scale),
            ]
        )
        largest = sizes.max() if sizes.numel() else sizes.new_zeros(())
        if self._sums is not None:
            earlier_bins, earlier_kinds, earlier_largest = self._sums
            bins, kinds = bins + earlier_bins, kinds + earlier_kinds
            largest = torch.maximum(largest, earlier_largest)
        self._sums = bins, kinds, largest

    def read(self) -> Histogram:
        """The counts so far.  Synchronizes with the device."""
        if self._sums is None:
            return Histogram()
        bins, kinds, largest = self._sums
        return Histogram(
            {i + _LOWEST_EXP: n for i, n in enumerate(bins.tolist()) if n},
            dict(zip(_KINDS, kinds.tolist(), strict=True)),
            largest.item(),
        )


def _count_in_float16(sizes: Tensor) -> list[Tensor]:
    """How many of these nonzero numbers become 0, subnormal or inf in float16."""
    half = sizes.half()
    is_zero = half == 0
    return [is_zero.sum(), ((half < 2.0**SMALLEST_NORMAL) & ~is_zero).sum(), half.isinf().sum()]


@dataclasses.dataclass
class Histogram:
    """Absolute values of gradients.

    `bins[e]` counts the values in `(2**(e-1), 2**e]`.  At a scale of `2**k` float16 flushes the
    bins with `e + k <= -25` to zero, and no others.  `kinds` counts elements that are zero or not
    finite, and elements that float16 would flush or make subnormal, at scale 1 and at the loss
    scales of their steps ("now").  "over now" counts elements that would become inf.  `largest` is
    the largest finite value.
    """

    bins: dict[int, int] = dataclasses.field(default_factory=dict)
    kinds: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(_KINDS, 0))
    largest: float = 0.0

    @property
    def counted(self) -> int:
        """The number of finite nonzero elements; shares are fractions of this number."""
        return sum(self.bins.values())

    def share(self, kind: str) -> float:
        """The share of `kind` among the counted elements, or 0 if none was counted."""
        return self.kinds[kind] / self.counted if self.counted else 0.0

    def flushed_at(self, exponent: int) -> float:
        """The share that float16 flushes to zero at a loss scale of `2**exponent`."""
        lost = sum(n for e, n in self.bins.items() if e + exponent <= _FLUSHED_EXP)
        return lost / self.counted if self.counted else 0.0

    def __add__(self, other: Histogram) -> Histogram:
        bins = {
            e: self.bins.get(e, 0) + other.bins.get(e, 0) for e in sorted({*self.bins, *other.bins})
        }
        kinds = {kind: self.kinds[kind] + other.kinds[kind] for kind in _KINDS}
        return Histogram(bins, kinds, max(self.largest, other.largest))

    def static_scale(self, lost: float) -> Suggestion:
        """The smallest power of two, 1 or more, at which at most the share `lost` is flushed.

        If the largest gradient would pass 65504 at this scale, the largest scale that keeps it
        below is suggested instead, and `fits` is False.
        """
        if not 0 <= lost < 1:
            raise ValueError(f"lost={lost!r}: expected a share of at least 0 and below 1.")
        highest = self.highest_exponent()
        wanted = next(k for k in range(-_LOWEST_EXP + 1) if self.flushed_at(k) <= lost)
        exponent = min(wanted, highest)
        return Suggestion(2.0**exponent, self.flushed_at(exponent), wanted <= highest, lost)

    def highest_exponent(self) -> int:
        """The largest power of two that keeps the largest gradient under 65504."""
        exponent = 127
        while self.largest * 2.0**exponent >= LARGEST:
            exponent -= 1
        return exponent


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A static loss scale, the share that it loses, and whether that is at most `asked`."""

    scale: float
    lost: float
    fits: bool
    asked: float

    def __str__(self) -> str:
        if self.fits:
            return (
                f"A static loss scale of {self.scale:g} loses {percent(self.lost)} of the "
                f"gradients (limit: {percent(self.asked)}) and keeps the largest below {LARGEST:g}."
            )
        return (
            f"No static loss scale loses {percent(self.asked)} or less: {self.scale:g} loses "
            f"{percent(self.lost)}, and above it the largest gradient passes {LARGEST:g}. Use "
            "bfloat16, which has the range of float32."
        )


def percent(share: float) -> str:
    """A share in percent; 0 % and 100 % appear only if they are exact."""
    if 0 < share < 0.0001:
        return "under 0.01 %"
    if 0.9999 < share < 1:
        return "over 99.99 %"
    return f"{100 * share:.2f} %"
