"""Advice on speed, from the counts of a `CastReport`.

Sizes in multiples of 8: NVIDIA, "Matrix Multiplication Background User's Guide"
(DU-09799-001), on Tensor Core requirements for float16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from . import speed

if TYPE_CHECKING:
    from .explain import CastReport

SHOWN = 10  # at most so many layers and bounces are named


def advice(found: CastReport) -> list[str]:
    """One sentence for each piece of advice; measures the CPU if it ran in half."""
    return [*_slow_halves(found), *_bounces(found), *_odd_sizes(found), *_nothing_in_half(found)]


def _slow_halves(found: CastReport) -> Iterator[str]:
    used = {dtype for device, dtype in found.used if device == "cpu"}
    if not used:
        return
    speeds = speed.measure("cpu")
    for dtype in sorted(used, key=str):
        slow = [one for one in speeds if one.dtype is dtype and one.verdict == "slower"]
        if slow:
            fast = speed.fast(speeds)
            what = (
                f'torch.{fast[0]} is faster than FP32 here: dtype="{fast[0]}".'
                if fast
                else 'opt_level="O0" would be faster here.'
            )
            figures = ", ".join(f"{one.operation} at {one.shown()}" for one in slow)
            yield f"{dtype} is slow on this CPU: {figures} of FP32's speed (measured). {what}"


def _bounces(found: CastReport) -> Iterator[str]:
    pairs = sorted(found.bounces.items(), key=lambda pair: -pair[1].bytes)
    for (source, target), bounce in pairs[:SHOWN]:
        yield (
            f"{source} runs in FP32 on half inputs and {target} casts its result back to half: "
            f"{bounce.times} times, {bounce.bytes} bytes. Where float16's range and precision do, "
            f'overrides={{{source}: "half"}} saves both casts.'
        )


def _odd_sizes(found: CastReport) -> Iterator[str]:
    odd = [
        f"{name or 'the model'} ({', '.join(f'{what}={n}' for what, n in use.odd_sizes.items())})"
        for name, use in found.modules.items()
        if use.odd_sizes
    ]
    if odd:
        more = f" and {len(odd) - SHOWN} more" if len(odd) > SHOWN else ""
        yield (
            "Sizes that are no multiple of 8, which Tensor Cores of NVIDIA GPUs take less well or "
            f"not at all: {', '.join(odd[:SHOWN])}{more}."
        )


def _nothing_in_half(found: CastReport) -> Iterator[str]:
    if found.modules and not found.used:
        yield (
            'Nothing ran in a half type: ampatch.initialize(..., opt_level="O1") was not called, '
            "or is at O0, or casts are off."
        )
