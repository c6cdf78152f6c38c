"""The report on gradients: as text, and for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from .histogram import SMALLEST, SMALLEST_NORMAL, Histogram, Suggestion, percent

MAX_NAMES = 5  # of parameters
MAX_LINES = 30  # of the histogram
BAR_WIDTH = 40  # characters


@dataclasses.dataclass
class GradientReport:
    """The counts over `steps` optimizer steps; `skipped` steps are not among them.

    `total` counts all gradients, `by_parameter` those of each parameter by its name.  `suggestion`
    has the static loss scale to use.  `scale` is the loss scale at the last step, with several
    losses that of the first.

    `floor` is the smallest number that float16 gradients could hold at the loss scales in use;
    smaller ones are counted as zeros.  None: gradients were not computed in float16.

    `left_out` names biases that are partly not counted, because their true gradients are zero (the
    bias of an attention's keys, which the softmax cancels).  `hooked` names parameters with
    gradient hooks: gradients are counted after the hooks, and no scale is suggested.
    """

    steps: int
    skipped: int
    scale: float
    floor: float | None
    total: Histogram
    by_parameter: dict[str, Histogram]
    suggestion: Suggestion
    left_out: list[str]
    hooked: list[str]

    def worst(self) -> list[tuple[str, float]]:
        """The parameters that lose most at scale 1, with the shares that they lose."""
        histograms = self.by_parameter.items()
        shares = ((name, histogram.share("flushed")) for name, histogram in histograms)
        lossy = [pair for pair in shares if pair[1] > 0]
        return sorted(lossy, key=lambda pair: -pair[1])[:MAX_NAMES]

    def __str__(self) -> str:
        """The histogram with float16's limits, the shares, and the suggested scale."""
        kinds = self.total.kinds
        skipped = f" ({self.skipped} more were skipped)" if self.skipped else ""
        lines = [
            f"{self.total.counted} nonzero gradient elements over {self.steps} optimizer steps"
            f"{skipped}; {kinds['zero']} are zero, {kinds['not finite']} are inf or NaN.",
        ]
        if self.total.counted:
            advice = self._hooks_note() or str(self.suggestion)
            lines += [*_bars(self.total), *_shares(self), advice]
        if self.floor is not None:
            lines.append(
                f"These gradients were computed in float16: values below {self.floor:.3g} became "
                'zero and are counted as zeros. Run at opt_level="O0" to see the whole range.'
            )
        if self.left_out:
            lines.append(
                f"Left out: parts of {', '.join(self.left_out)}. Their true gradients are zero, "
                "because a softmax cancels its keys' bias and a batch norm the bias before it."
            )
        return "\n".join(lines)

    def _suggests(self) -> bool:
        return bool(self.total.counted) and not self.hooked

    def _hooks_note(self) -> str:
        if not self.hooked:
            return ""
        names = ", ".join(self.hooked[:MAX_NAMES])
        return (
            f"No static loss scale is suggested: hooks on {names} change "
            "gradients before they are counted. Hooks see gradients times the loss scale."
        )

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON; keys of `bins` are exponents of upper ends, shares are 0 to 1."""
        return {
            "steps": self.steps,
            "skipped_steps": self.skipped,
            "loss_scale": self.scale,
            "floor": self.floor,
            "suggestion": dataclasses.asdict(self.suggestion) if self._suggests() else None,
            "left_out": self.left_out,
            "hooked": self.hooked,
            **_histogram_as_dict(self.total),
            "parameters": {name: _histogram_as_dict(h) for name, h in self.by_parameter.items()},
        }


def _histogram_as_dict(histogram: Histogram) -> dict[str, Any]:
    return {
        "bins": {str(e): n for e, n in sorted(histogram.bins.items())},
        "counted": histogram.counted,
        "largest": histogram.largest,
        "counts": {kind.replace(" ", "_"): count for kind, count in histogram.kinds.items()},
        "flushed_share": histogram.share("flushed"),
        "flushed_share_now": histogram.share("flushed now"),
        "subnormal_share": histogram.share("subnormal"),
        "subnormal_share_now": histogram.share("subnormal now"),
    }


def _bars(histogram: Histogram) -> Iterator[str]:
    """One line for each range of exponents, the smallest first."""
    if not histogram.bins:
        return
    first, last = min(histogram.bins), max(histogram.bins)
    width = -(-(last - first + 1) // MAX_LINES)
    edges = range(first - first % width, last + 1, width)
    groups = [(e, sum(histogram.bins.get(e + i, 0) for i in range(width))) for e in edges]
    most = max(n for _, n in groups)
    yield "absolute value         share"
    for edge, n in groups:
        bar, upper = "#" * -(-BAR_WIDTH * n // most), edge + width - 1
        share = percent(n / histogram.counted) if n else "-"
        ends = f"2^{edge - 1:<4} to 2^{upper:<4}"
        yield f"{ends} {share:>12}  {bar:<{BAR_WIDTH}} {_zone(upper)}".rstrip()


def _zone(upper: int) -> str:
    """What numbers up to `2**upper` become in float16 at scale 1."""
    if upper < SMALLEST:
        return "zero in float16"
    if upper <= SMALLEST_NORMAL:
        return "subnormal in float16"
    return "" if upper <= 16 else "inf in float16"


def _shares(report: GradientReport) -> Iterator[str]:
    """What float16 flushes and makes subnormal, at scale 1 and at the present scale."""
    total = report.total
    yield f"Largest: {total.largest:g}."
    scales = [("", "1")]
    if report.scale != 1:
        scales.append((" now", f"{report.scale:g} (the current one)"))
    for suffix, scale in scales:
        yield (
            f"At loss scale {scale} float16 flushes {percent(total.share('flushed' + suffix))} to "
            f"zero and makes {percent(total.share('subnormal' + suffix))} subnormal"
            + (f", {percent(total.share('over now'))} inf." if suffix else ".")
        )
    worst = [f"{name} ({percent(share)})" for name, share in report.worst()]
    if worst:
        yield f"Flushed most at scale 1: {', '.join(worst)}."
