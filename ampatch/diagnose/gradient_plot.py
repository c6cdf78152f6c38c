"""A gradient histogram as a picture."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .histogram import SMALLEST, SMALLEST_NORMAL

if TYPE_CHECKING:
    from .gradient_range import GradientReport


def check() -> None:
    """Raise `ImportError` if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "A plot of gradients needs matplotlib, which is not installed: "
            "pip install matplotlib, or pip install ampatch[sweep]."
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

    total = report.total
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    exponents = sorted(total.bins)
    heights = [100 * total.bins[e] / total.counted for e in exponents]
    axes.bar([e - 0.5 for e in exponents], heights, width=0.9, color="#3b6ea5")
    low = min([*exponents, SMALLEST - 4]) - 2
    axes.axvspan(low, SMALLEST - 1, color="#c0392b", alpha=0.15, label="zero in float16")
    axes.axvspan(
        SMALLEST - 1, SMALLEST_NORMAL, color="#e0a030", alpha=0.2, label="subnormal in float16"
    )
    for scale, name in ((report.scale, "present"), (report.suggestion.scale, "suggested")):
        if scale != 1:
            axes.axvline(
                SMALLEST - 1 - math.log2(scale),
                linestyle="--" if name == "present" else ":",
                color="#333333",
                label=f"zero below, at the {name} loss scale {scale:g}",
            )
    axes.set_xlim(left=low)
    axes.set_xlabel("binary exponent of the absolute value")
    axes.set_ylabel("share of the gradients that are not zero, %")
    axes.set_title(f"Gradients over {report.steps} steps, largest {total.largest:.3g}")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=150)
