"""A gradient histogram as a picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .histogram import SMALLEST, SMALLEST_NORMAL, Histogram

if TYPE_CHECKING:
    from .gradient_range import GradientReport


def check() -> None:
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


def plot(report: GradientReport, path: Any) -> None:
    """Write the picture to `path`; raises `ImportError` and `OSError`."""
    check()
    from matplotlib.figure import Figure  # no pyplot: the script may have a backend of its own
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_yscale("log")
    low = _bars(axes, report.total)
    _limits(axes, report, low)
    axes.xaxis.set_major_locator(LogLocator(numticks=12))
    axes.set_xlabel("absolute value of the gradient")
    axes.set_ylabel("share of the gradients that are not zero, %")
    axes.set_title(f"Gradients over {report.steps} steps, largest {report.total.largest:.3g}")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=150)


def _bars(axes: Any, total: Histogram) -> float:
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


def _limits(axes: Any, report: GradientReport, low: float) -> None:
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
