"""A `CastReport` as text: functions, modules, advice, the native part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ampatch import native

from .dtype_names import dtype_name

if TYPE_CHECKING:
    import torch

    from .explain import CastReport


def as_text(found: CastReport) -> str:
    """Four parts, separated by empty lines."""
    parts = [
        functions(found),
        modules(found),
        tips(found),
        [f"Native part: {native.status().reason}"],
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def functions(found: CastReport) -> list[str]:
    """A line for each patched function that was called, the most bytes cast first."""
    if not found.functions:
        return ["No patched function was called (O2 and O3 run the model in half; see below)."]
    ordered = sorted(found.functions.items(), key=lambda pair: (-pair[1].bytes, pair[0]))
    rows = [
        (
            name,
            calls.calls,
            calls.casts,
            calls.cached,
            calls.bytes,
            ", ".join(f"{n} {dtype_name(dtype)}" for dtype, n in calls.to.items()),
        )
        for name, calls in ordered
    ]
    total = [
        sum(getattr(calls, column) for _, calls in ordered)
        for column in ("calls", "casts", "cached", "bytes")
    ]
    head = ("function", "calls", "casts", "cached", "bytes cast", "tensors cast to")
    lines = _table([head, *rows, ("all", *total, "")])
    together = found.batches
    if together.batches:
        lines.append(
            "Weights are cast together as a forward begins: "
            f"{together.weights} casts in {together.batches} batches, {together.bytes} bytes."
        )
    return lines


def modules(found: CastReport) -> list[str]:
    """A line for each module that ran, with the dtypes its forward took and gave."""
    if not found.modules:
        return ["No module was called."]
    rows = [
        (name or "(the model)", use.kind, use.calls, _dtypes(use.takes), _dtypes(use.gives))
        for name, use in sorted(found.modules.items())
    ]
    return _table([("module", "class", "calls", "takes", "gives"), *rows], left=(0, 1, 3, 4))


def tips(found: CastReport) -> list[str]:
    """Where time could be won."""
    given = found.advice()
    if not given:
        return ["Nothing was found where time could be won."]
    return ["Where time could be won:", *(f"- {tip}" for tip in given)]


def _dtypes(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(map(dtype_name, dtypes))) or "-"


def _table(rows: Sequence[Sequence[object]], left: tuple[int, ...] = (0, 5)) -> list[str]:
    """Aligned columns; those in `left` are aligned to the left."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in texts
    ]
