"""How large gradients are, and what float16 would lose of them.

    with ampatch.gradient_range(model) as gradients:
        train(model)
    print(gradients.report())

Gradients are looked at when an optimizer is about to step on them: complete,
unscaled, at O2 those of the FP32 masters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import ampatch
from ampatch.api.internals import session_of

from .gradient_text import as_text
from .histogram import SMALLEST, Counts, Histogram, Suggestion
from .models import Models, check_model
from .storages import values

WORST = 5  # parameters that are named


def gradient_range(model: nn.Module | None = None) -> GradientRange:
    """Count a model's gradients by binary exponent, at each step of its optimizers.

    Works at any opt level and on plain models, before or after `initialize`; None
    counts those of every model that runs.  The `GradientRange` returned is a context
    manager; `remove()` or, for a model that was given, `ampatch.deactivate()` end it as well.

    Raises `TypeError` if `model` is no module.
    """
    check_model(model, "gradient_range")
    return GradientRange(model)


class GradientRange:
    """Counts while it is active; `report()` says what was counted so far."""

    def __init__(self, model: nn.Module | None) -> None:
        self.steps = 0
        self.skipped = 0
        self._scale = 1.0
        self._floor: float | None = None
        self._counts: dict[str, Counts] = {}
        self._models = Models(model)
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._stop: Callable[[], None] = ampatch.observe(self)

    def remove(self) -> None:
        """Stop counting."""
        self._models.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stop()

    def __enter__(self) -> GradientRange:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def report(self, lost: float = 0.001) -> GradientReport:
        """What was counted so far; `lost` is the share that a static scale may lose.

        Waits for the device.  Raises `ValueError` unless `0 <= lost < 1`.
        """
        by_parameter = {name: counts.read() for name, counts in self._counts.items()}
        total = sum(by_parameter.values(), Histogram())
        suggestion = total.static_scale(lost)
        return GradientReport(
            self.steps, self.skipped, self._scale, self._floor, total, by_parameter, suggestion
        )

    # What the engine and torch's optimizers tell

    def on_step(self, optimizer: Any, skipped: Any) -> None:
        """A skipped step's gradients overflowed: they say nothing of the range."""
        if skipped is True and self._mine(optimizer):
            self.skipped += 1

    def on_deactivate(self) -> None:
        """Everything ampatch put in is taken out; what watches a model of the user's, too."""
        if not self._models.takes_all:
            self.remove()

    def _before_step(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if not _closure(args, kwargs):
            self._count(optimizer)

    def _after_step(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if _closure(args, kwargs):  # it has computed the gradients
            self._count(optimizer)

    def _count(self, optimizer: Any) -> None:
        found = [
            (self._models.name_of(weight), weight.grad)
            for group in optimizer.param_groups
            for weight in group["params"]
            if weight.grad is not None
        ]
        session = session_of(optimizer)
        scale = 1.0 if session is None else session.scalers[0].get()
        mine = [(name, grad) for name, grad in found if name is not None]
        for name, grad in mine:
            self._counts.setdefault(name, Counts()).add(values(grad), scale)
        if mine:
            self.steps += 1
            self._scale = scale
            if _in_float16(session) or any(grad.dtype is torch.float16 for _, grad in mine):
                self._floor = max(self._floor or 0.0, 2.0**SMALLEST / scale)

    def _mine(self, optimizer: Any) -> bool:
        return any(
            self._models.name_of(weight) is not None
            for group in optimizer.param_groups
            for weight in group["params"]
        )


@dataclasses.dataclass
class GradientReport:
    """What was counted: over `steps` optimizer steps that were taken.

    `scale` is the loss scale (of several losses the first's) at the last of them.

    Where gradients were computed in float16, `floor` is the smallest number that they
    could be at the scales in force: what was smaller is among the zeros.  Else None.
    """

    steps: int
    skipped: int
    scale: float
    floor: float | None
    total: Histogram
    by_parameter: dict[str, Histogram]
    suggestion: Suggestion

    def worst(self) -> list[tuple[str, float]]:
        """Parameters that lose most at scale 1, with the shares they lose."""
        shares = [(name, found.share("flushed")) for name, found in self.by_parameter.items()]
        lossy = [pair for pair in shares if pair[1] > 0]
        return sorted(lossy, key=lambda pair: -pair[1])[:WORST]

    def __str__(self) -> str:
        return as_text(self)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: `bins` has the upper ends' exponents as keys, shares are of 1."""
        return {
            "steps": self.steps,
            "skipped_steps": self.skipped,
            "loss_scale": self.scale,
            "floor": self.floor,
            "suggestion": self.suggestion.as_dict(),
            **_histogram_as_dict(self.total),
            "parameters": {
                name: _histogram_as_dict(found) for name, found in self.by_parameter.items()
            },
        }

    def plot(self, path: Any) -> None:
        """Write the histogram as a picture, in the format that the name of `path` says.

        Raises `ImportError` without matplotlib, `OSError` where `path` cannot be written.
        """
        from .gradient_plot import plot

        plot(self, path)


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


def _in_float16(session: Any) -> bool:
    if session is None:
        return False
    properties = session.properties
    return properties.opt_level != "O0" and properties.dtype is torch.float16


def _closure(args: tuple, kwargs: dict) -> Any:
    return kwargs.get("closure", args[0] if args else None)
