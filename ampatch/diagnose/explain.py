"""Which tensors were cast for which function, and which casts could be saved.

with ampatch.report(model) as casts:
    train(model)
print(casts)

"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import ampatch
from ampatch import native
from ampatch.session import facade

from .casts_seen import CastWatch
from .tensors import dtype_name, tensors_in
from .watched_modules import WatchedModules, check_model

HALVES = {torch.float16, torch.bfloat16}
MAX_BOUNCES = 10  # bounces that the advice lists


def report(model: nn.Module | None = None) -> CastReport:
    """Count the casts of patched functions, and the dtypes of the inputs and outputs of modules.

    Functions are counted in all threads, modules only in `model` (None: in all models that run).
    Counting ends with `remove()`, with the `with` block or, for a given model, with
    `ampatch.deactivate()`.  Patched calls are slower while it counts.  Compiled code is not
    counted.

    Raises `TypeError` if `model` is not a module.
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
    """Counts while it is active; `str(report)` is the report so far.

    `functions` counts calls and casts by the function's name, `modules` calls and dtypes by the
    module's path.  `batches` counts weights that were cast together.  `bounces` counts pairs of
    casts that could be saved: a cast to FP32 for one function, and the cast of its result back to
    half for the next one.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._counts = CastWatch()
        self.functions = self._counts.functions
        self.batches = self._counts.batches
        self.bounces = self._counts.bounces
        self.modules: dict[str, ModuleUse] = {}
        self._levels = _open_levels()
        self._counts.start()
        self._models = WatchedModules(model, on_exit=self._after_forward)
        self._stop_observing = ampatch.observe(self)

    def remove(self) -> None:
        """Stop counting."""
        self._counts.stop()
        self._models.remove()
        self._stop_observing()

    def __enter__(self) -> CastReport:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def on_initialize(self, properties: Any) -> None:
        """Record the level of an `initialize` that is called while this counts."""
        self._levels |= _open_levels()

    def on_deactivate(self) -> None:
        """Stop a report of a given model."""
        if not self._models.watches_all:
            self.remove()

    def _after_forward(self, module: nn.Module, args: tuple, output: Any) -> None:
        name = self._models.names[module]
        use = self.modules.setdefault(name, ModuleUse(type(module).__name__))
        use.calls += 1
        for dtypes, tensors in ((use.takes, tensors_in(args)), (use.gives, tensors_in(output))):
            dtypes |= {tensor.dtype for tensor in tensors}
            self._counts.used |= dtypes & HALVES

    @property
    def used(self) -> set[torch.dtype]:
        """The half dtypes in use."""
        return self._counts.used

    def advice(self) -> list[str]:
        """Sentences on casts that could be saved, or on why nothing ran in half."""
        pairs = sorted(self.bounces.items(), key=lambda pair: -pair[1].bytes)
        tips = [
            f"{source} runs in FP32 on half inputs and {target} casts its result back to half: "
            f"{bounce.times} times, {bounce.bytes} bytes. If half precision is enough here, "
            f'overrides={{{source}: "half"}} saves both casts.'
            for (source, target), bounce in pairs[:MAX_BOUNCES]
        ]
        if self.modules and not self.used:
            tips.append(f"Nothing ran in half precision, because {self._why_nothing_is_half()}.")
        return tips

    def _why_nothing_is_half(self) -> str:
        levels = self._levels | _open_levels()
        if not levels:
            return 'ampatch.initialize(..., opt_level="O1") was not called'
        if levels <= {"O0"}:
            return "ampatch is at O0 or disabled"
        return "casts are off, or the model called no function that is cast"

    def __str__(self) -> str:
        """Functions, modules, advice and the native part, separated by empty lines."""
        tips = [f"- {tip}" for tip in self.advice()]
        parts = [
            _functions(self),
            _modules(self),
            ["Where time could be saved:", *tips] if tips else ["Nothing to speed up was found."],
            [f"Native part: {native.status().reason}"],
        ]
        return "\n\n".join("\n".join(part) for part in parts)

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON; `bytes` are the bytes that casts wrote."""
        return {
            "functions": {
                name: {**vars(calls), "to": {dtype_name(t): n for t, n in calls.to.items()}}
                for name, calls in self.functions.items()
            },
            "batches": vars(self.batches),
            "bounces": [
                {"from": source, "to": target, **vars(bounce)}
                for (source, target), bounce in self.bounces.items()
            ],
            "modules": {
                name: {**vars(use), "takes": _names(use.takes), "gives": _names(use.gives)}
                for name, use in self.modules.items()
            },
            "advice": self.advice(),
            "native_part": native.status().reason,
        }


def _open_levels() -> set[str]:
    """The opt levels of the open sessions, O0 for a disabled one."""
    properties = [session.properties for session in facade.open_sessions()]
    return {each.opt_level if each.enabled else "O0" for each in properties}


def _functions(report: CastReport) -> list[str]:
    """A line for each patched function that was called, the most bytes cast first."""
    if not report.functions:
        return ["No function that ampatch casts was called."]
    rows = [
        (name, calls.calls, calls.casts, calls.cached, calls.bytes,
         ", ".join(f"{n} {dtype_name(dtype)}" for dtype, n in calls.to.items()))
        for name, calls in report.functions.items()
    ]  # fmt: skip
    rows.sort(key=lambda row: (-row[4], row[0]))
    counted = ("calls", "casts", "cached", "bytes")
    total = [sum(getattr(c, column) for c in report.functions.values()) for column in counted]
    head = ("function", "calls", "casts", "cached", "bytes cast", "tensors cast to")
    lines = _table([head, *rows, ("all", *total, "")], left=(0, 5))
    batches = report.batches
    if batches.batches:
        lines.append(
            "Weights are cast together as a forward begins: "
            f"{batches.weights} casts in {batches.batches} batches, {batches.bytes} bytes."
        )
    return lines


def _modules(report: CastReport) -> list[str]:
    """A line for each module that ran, with the dtypes its forward took and gave."""
    if not report.modules:
        return ["No module was called."]
    rows = [
        (name or "(the model)", use.kind, use.calls,
         ", ".join(_names(use.takes)) or "-", ", ".join(_names(use.gives)) or "-")
        for name, use in sorted(report.modules.items())
    ]  # fmt: skip
    return _table([("module", "class", "calls", "inputs", "outputs"), *rows], left=(0, 1, 3, 4))


def _names(dtypes: set[torch.dtype]) -> list[str]:
    return sorted(map(dtype_name, dtypes))


def _table(rows: Sequence[Sequence[object]], left: tuple[int, ...]) -> list[str]:
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
