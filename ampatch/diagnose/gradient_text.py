"""A gradient histogram as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .histogram import SMALLEST, SMALLEST_NORMAL, Histogram, percent

if TYPE_CHECKING:
    from .gradient_range import GradientReport

LINES = 30
BAR = 40


def as_text(report: GradientReport) -> str:
    """The histogram with float16's limits, the shares, and the suggested scale."""
    total = report.total
    return "\n".join(
        [
            f"{total.counted} gradients that are not zero, over {report.steps} optimizer steps"
            + (f" ({report.skipped} more were skipped)" if report.skipped else "")
            + f"; {total.kinds['zero']} are zero, {total.kinds['not finite']} not finite.",
            *bars(total),
            *shares(report),
            str(report.suggestion),
            *floor(report),
        ]
    )


def bars(found: Histogram) -> Iterator[str]:
    """One line for each range of exponents, the smallest first."""
    if not found.bins:
        return
    first, last = min(found.bins), max(found.bins)
    width = -(-(last - first + 1) // LINES)
    edges = range(first - first % width, last + 1, width)
    groups = [(e, sum(found.bins.get(e + i, 0) for i in range(width))) for e in edges]
    most = max(n for _, n in groups)
    yield "absolute value         share"
    for edge, n in groups:
        bar = "#" * -(-BAR * n // most)
        upper = edge + width - 1
        ends = f"2^{edge - 1:<4} to 2^{upper:<4}"
        yield f"{ends} {_share(n, found):>12}  {bar:<{BAR}} {_zone(upper)}".rstrip()


def _share(n: int, found: Histogram) -> str:
    return percent(n / found.counted) if n else "-"


def _zone(upper: int) -> str:
    """What numbers up to `2**upper` become in float16 at scale 1."""
    if upper < SMALLEST:
        return "zero in float16"
    if upper <= SMALLEST_NORMAL:
        return "subnormal in float16"
    return "" if upper <= 16 else "inf in float16"


def shares(report: GradientReport) -> Iterator[str]:
    """What float16 flushes and makes subnormal, at scale 1 and at the scale in force."""
    total = report.total
    yield f"Largest: {total.largest:g}."
    scales = [("", "1")]
    if report.scale != 1:
        scales.append((" now", f"{report.scale:g} (the present one)"))
    for suffix, scale in scales:
        yield (
            f"At loss scale {scale} float16 flushes {percent(total.share('flushed' + suffix))} to "
            f"zero and makes {percent(total.share('subnormal' + suffix))} subnormal"
            + (f", {percent(total.share('over now'))} inf." if suffix else ".")
        )
    worst = [f"{name} ({percent(share)})" for name, share in report.worst()]
    if worst:
        yield f"Flushed most at scale 1: {', '.join(worst)}."


def floor(report: GradientReport) -> Iterator[str]:
    """A note for gradients that were computed in float16 already."""
    if report.floor is not None:
        yield (
            f"These were computed in float16: what was smaller than {report.floor:.3g} is among "
            "the zeros, and no scale computed from the rest brings it back. The whole range is "
            "seen at "
            'opt_level="O0".'
        )
