"""What was cast, for which function, and where time could be won.

with ampatch.report(model) as casts:
    train(model)
print(casts)

"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

import ampatch
from ampatch import native

from .casts_seen import CastWatch
from .dtype_names import dtype_name
from .models import Models, check_model
from .trees import tensors_in

HALVES = {torch.float16, torch.bfloat16}
SHOWN = 10  # at most so many bounces are named


def report(model: nn.Module | None = None) -> CastReport:
    """Count the casts that patched functions make, and the dtypes that modules take and give.

    Functions are counted in all threads until `remove()`, the end of a `with` block or, for
    a model that was given, `ampatch.deactivate()`; modules are those of `model`, or (None)
    all that run.  While it is on, patched calls take longer; off, nothing is left in place.
    Code that torch.compile has compiled is not seen.

    Raises `TypeError` if `model` is no module.
    """
    check_model(model, "report")
    return CastReport(model)


@dataclasses.dataclass
class ModuleUse:
    """One module: its class, its calls, and the dtypes of its inputs and outputs."""

    kind: str
    calls: int = 0
    takes: set[torch.dtype] = dataclasses.field(default_factory=set)
    gives: set[torch.dtype] = dataclasses.field(default_factory=set)


class CastReport:
    """Counts while it is active; `str` of it is the report so far.

    `functions`, `batches` and `bounces` are `CastWatch`'s; `modules` has a
    `ModuleUse` for each module by its path.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._watch = CastWatch()
        self.functions = self._watch.functions
        self.batches = self._watch.batches
        self.bounces = self._watch.bounces
        self.modules: dict[str, ModuleUse] = {}
        self._watch.start()
        self._models = Models(model, left=self._left)
        self._stop = ampatch.observe(self)

    def remove(self) -> None:
        """Stop counting."""
        self._watch.stop()
        self._models.remove()
        self._stop()

    def __enter__(self) -> CastReport:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def on_deactivate(self) -> None:
        """`ampatch.deactivate()` also ends a report of a given model."""
        if not self._models.takes_all:
            self.remove()

    def _left(self, module: nn.Module, args: tuple, output: Any) -> None:
        name = self._models.names[module]
        use = self.modules.setdefault(name, ModuleUse(type(module).__name__))
        use.calls += 1
        for dtypes, tensors in ((use.takes, tensors_in(args)), (use.gives, tensors_in(output))):
            dtypes |= {tensor.dtype for tensor in tensors}
            self._watch.used |= dtypes & HALVES

    @property
    def used(self) -> set[torch.dtype]:
        """The half types in use."""
        return self._watch.used

    def advice(self) -> list[str]:
        """Which casts could be saved, or that nothing is in half."""
        return [*_bounces(self), *_nothing_in_half(self)]

    def __str__(self) -> str:
        return _as_text(self)

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON; `bytes` are the bytes that casts wrote."""
        return {
            "functions": {
                name: {**dataclasses.asdict(calls), "to": _named(calls.to)}
                for name, calls in self.functions.items()
            },
            "batches": dataclasses.asdict(self.batches),
            "bounces": [
                {"from": source, "to": target, **dataclasses.asdict(bounce)}
                for (source, target), bounce in self.bounces.items()
            ],
            "modules": {
                name: {
                    **dataclasses.asdict(use),
                    "takes": sorted(map(dtype_name, use.takes)),
                    "gives": sorted(map(dtype_name, use.gives)),
                }
                for name, use in self.modules.items()
            },
            "advice": self.advice(),
            "native_part": native.status().reason,
        }


def _named(counts: dict[torch.dtype, int]) -> dict[str, int]:
    return {dtype_name(dtype): n for dtype, n in counts.items()}


def _as_text(found: CastReport) -> str:
    """Four parts, separated by empty lines."""
    parts = [
        _functions(found),
        _modules(found),
        _tips(found),
        [f"Native part: {native.status().reason}"],
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def _functions(found: CastReport) -> list[str]:
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


def _modules(found: CastReport) -> list[str]:
    """A line for each module that ran, with the dtypes its forward took and gave."""
    if not found.modules:
        return ["No module was called."]
    rows = [
        (name or "(the model)", use.kind, use.calls, _dtypes(use.takes), _dtypes(use.gives))
        for name, use in sorted(found.modules.items())
    ]
    return _table([("module", "class", "calls", "takes", "gives"), *rows], left=(0, 1, 3, 4))


def _tips(found: CastReport) -> list[str]:
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


def _bounces(found: CastReport) -> Iterator[str]:
    pairs = sorted(found.bounces.items(), key=lambda pair: -pair[1].bytes)
    for (source, target), bounce in pairs[:SHOWN]:
        yield (
            f"{source} runs in FP32 on half inputs and {target} casts its result back to half: "
            f"{bounce.times} times, {bounce.bytes} bytes. Where float16's range and precision do, "
            f'overrides={{{source}: "half"}} saves both casts.'
        )


def _nothing_in_half(found: CastReport) -> Iterator[str]:
    if found.modules and not found.used:
        yield (
            'Nothing ran in a half type: ampatch.initialize(..., opt_level="O1") was not called, '
            "or is at O0, or casts are off."
        )
