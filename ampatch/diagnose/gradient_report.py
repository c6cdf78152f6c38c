"""The report on gradients: as text, as a picture, and for JSON."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .histogram import SMALLEST, SMALLEST_NORMAL, Histogram, Suggestion, percent

WORST = 5  # so many parameters are named
LINES = 30
BAR = 40


@dataclasses.dataclass
class GradientReport:
    """The counts over `steps` optimizer steps; `skipped` steps are not among them.

    `scale` is the loss scale at the last step, with several losses that of the first.

    If gradients were computed in float16, `floor` is the smallest number that they could
    hold at the scales in force; smaller ones are among the zeros.  Otherwise it is None.

    `left_out` names the biases of `nn.MultiheadAttention` whose part for the keys is not counted.
    """

    steps: int
    skipped: int
    scale: float
    floor: float | None
    total: Histogram
    by_parameter: dict[str, Histogram]
    suggestion: Suggestion
    left_out: list[str]

    def worst(self) -> list[tuple[str, float]]:
        """The parameters that lose most at scale 1, and the shares that they lose."""
        shares = [(name, found.share("flushed")) for name, found in self.by_parameter.items()]
        lossy = [pair for pair in shares if pair[1] > 0]
        return sorted(lossy, key=lambda pair: -pair[1])[:WORST]

    def __str__(self) -> str:
        return _as_text(self)

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON; keys of `bins` are exponents of upper ends, shares are 0 to 1."""
        return {
            "steps": self.steps,
            "skipped_steps": self.skipped,
            "loss_scale": self.scale,
            "floor": self.floor,
            "suggestion": self.suggestion.as_dict(),
            "left_out": self.left_out,
            **_histogram_as_dict(self.total),
            "parameters": {
                name: _histogram_as_dict(found) for name, found in self.by_parameter.items()
            },
        }

    def plot(self, path: Any) -> None:
        """Write the histogram as a picture, in the format of the suffix of `path`.

        Raises `ImportError` without matplotlib, `OSError` if `path` cannot be written.
        """
        _draw(self, path)


def _histogram_as_dict(found: Histogram) -> dict[str, Any]:
    kinds = {kind.replace(" ", "_"): count for kind, count in found.kinds.items()}
    return {
        "bins": {str(e): n for e, n in sorted(found.bins.items())},
        "counted": found.counted,
        "largest": found.largest,
        "counts": kinds,
        "flushed_share": found.share("flushed"),
        "flushed_share_now": found.share("flushed now"),
        "subnormal_share": found.share("subnormal"),
        "subnormal_share_now": found.share("subnormal now"),
    }


def _as_text(report: GradientReport) -> str:
    """The histogram with float16's limits, the shares, and the suggested scale."""
    total = report.total
    return "\n".join(
        [
            f"{total.counted} gradients that are not zero, over {report.steps} optimizer steps"
            + (f" ({report.skipped} more were skipped)" if report.skipped else "")
            + f"; {total.kinds['zero']} are zero, {total.kinds['not finite']} not finite.",
            *_bars(total),
            *_shares(report),
            str(report.suggestion),
            *_floor(report),
            *_left_out(report),
        ]
    )


def _bars(found: Histogram) -> Iterator[str]:
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


def _shares(report: GradientReport) -> Iterator[str]:
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


def _floor(report: GradientReport) -> Iterator[str]:
    """A note for gradients that were computed in float16 already."""
    if report.floor is not None:
        yield (
            f"These were computed in float16: what was smaller than {report.floor:.3g} is among "
            "the zeros, and no scale computed from the rest brings it back. The whole range is "
            "seen at "
            'opt_level="O0".'
        )


def _left_out(report: GradientReport) -> Iterator[str]:
    """A note for gradients that are zero by mathematics."""
    if report.left_out:
        yield (
            "Left out, because the softmax cancels it and its gradient is rounding errors of zero: "
            f"the part for the keys of {', '.join(report.left_out)}."
        )


def check_plot() -> None:
    """Raise `ImportError` if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "A plot of gradients needs matplotlib, which is not installed: "
            'pip install matplotlib, or pip install "ampatch[sweep]".'
        ) from error


def check_path(path: Any) -> None:
    """Raise `OSError` or `ValueError` unless a picture can be written to `path`."""
    from matplotlib.backend_bases import FigureCanvasBase

    directory, suffix = Path(path).absolute().parent, Path(path).suffix[1:]
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        raise OSError(f"{path}: {directory} is no directory that can be written to.")
    kinds = FigureCanvasBase.get_supported_filetypes()
    if suffix and suffix.lower() not in kinds:
        raise ValueError(f"{path}: unknown kind of picture; expected one of {', '.join(kinds)}.")


def _draw(report: GradientReport, path: Any) -> None:
    """Write the picture to `path`; raises `ImportError` and `OSError`."""
    check_plot()
    from matplotlib.figure import Figure  # no pyplot: the script may have a backend of its own
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_yscale("log")
    low = _draw_bars(axes, report.total)
    _draw_limits(axes, report, low)
    axes.xaxis.set_major_locator(LogLocator(numticks=12))
    axes.set_xlabel("absolute value of the gradient")
    axes.set_ylabel("share of the gradients that are not zero, %")
    axes.set_title(f"Gradients over {report.steps} steps, largest {report.total.largest:.3g}")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=150)


def _draw_bars(axes: Any, total: Histogram) -> float:
    """A bar for each power of two; returns the lowest value that is shown."""
    shares = {2.0**e: 100 * n / total.counted for e, n in total.bins.items()}
    uppers = sorted(shares)
    axes.bar(
        [upper / 2 for upper in uppers],
        [shares[upper] for upper in uppers],
        width=[upper / 2 for upper in uppers],
        align="edge",
        color="#3b6ea5",
        edgecolor="white",
        linewidth=0.5,
    )
    axes.set_ylim(min(shares.values(), default=1.0) / 2, 100)
    return min([*uppers, 2.0 ** (SMALLEST - 4)]) / 4


def _draw_limits(axes: Any, report: GradientReport, low: float) -> None:
    """What float16 flushes and makes subnormal at scale 1, and where flushing ends at others."""
    flushed, normal = 2.0 ** (SMALLEST - 1), 2.0**SMALLEST_NORMAL
    axes.axvspan(low, flushed, color="#c0392b", alpha=0.15, label="zero in float16")
    axes.axvspan(flushed, normal, color="#e0a030", alpha=0.2, label="subnormal in float16")
    for scale, name, style in (
        (report.scale, "present", "--"),
        (report.suggestion.scale, "suggested", ":"),
    ):
        if scale != 1 and flushed / scale > low:  # further left there are no gradients
            label = f"zero below, at the {name} loss scale {scale:g}"
            axes.axvline(flushed / scale, linestyle=style, color="#333333", label=label)
    axes.set_xlim(left=low)
