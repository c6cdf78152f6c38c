"""The size of gradients, and the share of gradients that float16 would lose.

    with ampatch.gradient_range(model) as gradients:
        train(model)
    print(gradients.report())

Gradients are counted just before an optimizer's step: complete and unscaled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import ampatch
from ampatch.session.facade import session_of
from ampatch.torch_private.tensors import hooks_of

from .cancelled import noise_mask
from .gradient_report import GradientReport
from .histogram import SMALLEST, Counts, Histogram
from .tensors import values
from .watched_modules import WatchedModules, check_model


def gradient_range(model: nn.Module | None = None) -> GradientRange:
    """Count the gradients of a model by binary exponent, at each step of its optimizers.

        with ampatch.gradient_range(model) as gradients:
            train(model)
        print(gradients.report())

    Works at any opt level and on plain models, before or after `initialize`.  None counts the
    gradients of every model that runs.  Counting ends with the `with` block, with `remove()` or,
    for a given model, with `ampatch.deactivate()`.

    Raises `TypeError` if `model` is not a module.
    """
    check_model(model, "gradient_range")
    return GradientRange(model)


class GradientRange:
    """Counts while it is active; `report()` returns the counts so far."""

    def __init__(self, model: nn.Module | None) -> None:
        self.steps = 0
        self.skipped = 0
        self._scale = 1.0
        self._floor: float | None = None
        self._counts: dict[str, Counts] = {}
        self._left_out: set[str] = set()
        self._hooked: set[str] = set()
        self._models = WatchedModules(model)
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._stop_observing: Callable[[], None] = ampatch.observe(self)

    def remove(self) -> None:
        """Stop counting."""
        self._models.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stop_observing()

    def __enter__(self) -> GradientRange:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def report(self, lost: float = 0.001) -> GradientReport:
        """The counts so far; `lost` is the share that a static scale may lose.

        Synchronizes with the device.  Raises `ValueError` unless `0 <= lost < 1`.
        """
        by_parameter = {name: counts.read() for name, counts in self._counts.items()}
        total = sum(by_parameter.values(), Histogram())
        return GradientReport(
            self.steps, self.skipped, self._scale, self._floor, total, by_parameter,
            total.static_scale(lost), sorted(self._left_out), sorted(self._hooked),
        )  # fmt: skip

    # Called by ampatch and by torch's optimizers

    def on_step(self, optimizer: Any, skipped: Any) -> None:
        """Count a skipped step; its gradients have overflowed and are not counted."""
        if skipped is True and self._watched_params(optimizer):
            self.skipped += 1

    def on_deactivate(self) -> None:
        """`ampatch.deactivate()` also ends the counting for a given model."""
        if not self._models.watches_all:
            self.remove()

    def _before_step(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if not _closure_of(args, kwargs):
            self._count(optimizer)

    def _after_step(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if _closure_of(args, kwargs):  # the closure has computed the gradients
            self._count(optimizer)

    def _count(self, optimizer: Any) -> None:
        params = self._watched_params(optimizer)
        self._hooked.update(name for name, param in params if any(hooks_of(param)))
        grads = [(name, param.grad) for name, param in params]
        counted = [(name, grad) for name, grad in grads if grad is not None]
        if not counted:
            return
        session = session_of(optimizer)
        self._scale = scale = 1.0 if session is None else session.scalers[0].get()
        self.steps += 1
        half = torch.float16 if session is None else session.properties.dtype
        by_name = dict(counted)
        for name, grad in counted:
            noise = noise_mask(name, by_name, half)
            if noise is not None:
                self._left_out.add(name)
                grad = grad[~noise]
            self._counts.setdefault(name, Counts()).add(values(grad), scale)
        if _in_float16(session) or any(grad.dtype is torch.float16 for _, grad in counted):
            self._floor = max(self._floor or 0.0, 2.0**SMALLEST / scale)

    def _watched_params(self, optimizer: Any) -> list[tuple[str, Tensor]]:
        """The parameters of the watched models in an optimizer, by name."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        named = [(self._models.name_of(param), param) for param in params]
        return [(name, param) for name, param in named if name is not None]


def _in_float16(session: Any) -> bool:
    if session is None:
        return False
    properties = session.properties
    return properties.opt_level != "O0" and properties.dtype is torch.float16


def _closure_of(args: tuple, kwargs: dict) -> Any:
    return kwargs.get("closure", args[0] if args else None)
