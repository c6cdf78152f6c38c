"""The first non-finite value of a training, and its origin: `ampatch.debug`.

The debugger checks the outputs of modules, the loss, the gradients of parameters and, after a step,
the weights.  The report names the operator that made the value.  To find it, the output of every
operator is checked.  Each check synchronizes with the device, which is too slow for normal
training.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import ampatch

from ..config.optimizer_eps import lost_eps
from ..types import StopAt
from .debug_report import Report, location
from .operators import CHECKED_DTYPES, CallSite, Origin, OriginTracker, is_finite, largest, values
from .tensors import tensors_in
from .watched_modules import WatchedModules, check_model

logger = logging.getLogger("ampatch")


STOP_AT = ("unabsorbed", "any")


def debug(model: nn.Module | None = None, *, stop_at: StopAt = "unabsorbed") -> Debugger:
    """Watch a model for its first inf or NaN, logged as one error on the logger "ampatch".

        with ampatch.debug(model) as debugger:
            train(model)
        print(debugger.report)

    `debugger.report` is None until an inf or NaN is found.  With `stop_at="unabsorbed"` the report
    is about the first one that a smaller loss scale (of 1 or more) would not cure; `passed_over`
    lists the overflows of backward passes that it would cure.  With `stop_at="any"` the report is
    about the first inf or NaN of all.  An inf that the code writes itself, as into a mask, is not
    reported.

    Works on managed models at any opt level and on plain ones, before or after `initialize`.  With
    `model=None` every model is watched; names then begin with the model's class.  Only operators
    of the calling thread and of its backward passes are watched.  The watch ends with the `with`
    block, with `remove()` in the same thread or, for a given model, with `ampatch.deactivate()`.

    Raises `TypeError` if `model` is not a module, `ValueError` for another `stop_at`.
    """
    check_model(model, "debug")
    if stop_at not in STOP_AT:
        raise ValueError(f'ampatch.debug(stop_at={stop_at!r}): expected "unabsorbed" or "any".')
    return Debugger(model, stop_at)


class Debugger:
    """Watches one model, or all; `report` is None until something is found.

    `passed_over` holds the first overflow of each step that a smaller loss scale cures;
    `unseen_skips` counts skipped steps whose inf or NaN came from no backward pass, for example
    when the script writes to `.grad`.  With `is_logged` the report is also logged, as an error on
    the logger "ampatch".
    """

    def __init__(
        self, model: nn.Module | None, stop_at: str = "unabsorbed", is_logged: bool = True
    ) -> None:
        self.report: Report | None = None
        self.passed_over: list[Report] = []
        self.unseen_skips = 0
        self.is_active = True
        self._is_logged = is_logged
        self._passes_over = stop_at == "unabsorbed"
        self._block_scaler: Any = None  # set in a `scale_loss` block
        self._is_stepping = False
        self._steps: dict[int, int] = {}
        self._handles: list[Any] = []
        self._models = WatchedModules(
            model, on_parameter=self._hook_parameter, on_exit=self._check_output
        )
        self._handles += [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._stop_observing = ampatch.observe(self)
        self._operators = OriginTracker(self._phase_and_module)
        self._operators.enter()

    def remove(self) -> None:
        """Remove every hook.  The report stays."""
        if not self.is_active:
            return
        self.is_active = False
        self._operators.leave()
        self._models.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stop_observing()

    def reset(self) -> None:
        """Drop the report and wait for the next inf or NaN."""
        self.report = None

    def __enter__(self) -> Debugger:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    @property
    def step(self) -> int:
        """Optimizer steps since the start, skipped ones too; of several optimizers the maximum."""
        return max(self._steps.values(), default=0)

    @property
    def running(self) -> list[nn.Module]:
        """The watched modules whose forward runs in this thread, outermost first."""
        return self._models.running

    def _phase_and_module(self) -> tuple[str, nn.Module | None]:
        """The current phase and module outside of backward, for `OriginTracker`."""
        running = self._models.running
        if running:
            return "forward", running[-1]
        return "step" if self._is_stepping else "forward", None

    # Called by ampatch and by torch's optimizers

    def on_loss(self, loss: Any, loss_id: int = 0) -> None:
        """Check the loss of a `scale_loss` block that begins."""
        self._check("loss", tensors_in(loss))

    def on_block(self, scaler: Any) -> None:
        """Store the scaler of the block until its backward pass ends."""
        self._block_scaler = scaler

    def on_backward(self, loss_id: int = 0) -> None:
        """Forget the scaler: the backward pass of the block has ended."""
        self._block_scaler = None

    def on_step(self, optimizer: Any, skipped: Any) -> None:
        """Count a skipped step of a managed optimizer; torch's hook counts other steps."""
        if skipped is True:
            self.unseen_skips += not self._skip_has_report()
            self._count(optimizer)

    def _skip_has_report(self) -> bool:
        """Whether this step, or with several optimizers the one before, has a report."""
        since = self.step - (len(self._steps) > 1)
        return self.report is not None or any(
            report.step >= since for report in self.passed_over[-1:]
        )

    def on_deactivate(self) -> None:
        """`ampatch.deactivate()` also ends the watch of a given model."""
        if not self._models.watches_all:
            self.remove()

    def _before_step(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        self._is_stepping = True

    def _after_step(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        self._is_stepping = False
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param in params if self.report is None else ():
            name = self._models.name_of(param)
            advice = lost_eps(optimizer) or ""
            noticed_in = f"weight {name}"
            if name is not None and self._check(noticed_in, [param], phase="step", advice=advice):
                if self.report is not None:  # set by `_check`
                    self.report.parameters.append(name)
                break
        self._count(optimizer)

    def _count(self, optimizer: Any) -> None:
        self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1

    # Forward and backward

    def _check_output(self, module: nn.Module, args: tuple, output: Any) -> None:
        name = self._models.names[module] or "the model"
        self._check(f"output of {name}", tensors_in(output), module, tensors_in(args))

    def _hook_parameter(self, parameter: Tensor) -> None:
        if parameter.requires_grad:
            self._handles += _hooks(parameter, self._check_gradient)

    def _check_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        if is_finite(gradient):
            return
        name = self._models.name_of(parameter)
        if name is None:
            return
        module = self._models.module_of(name)
        self._check(f"gradient of the parameter {name}", [gradient], module, phase="backward")
        for report in (self.report, *self.passed_over[-1:]):
            if report is not None and report.step == self.step:
                if name not in report.parameters:
                    report.parameters.append(name)
                break

    # The report

    def _check(
        self,
        noticed_in: str,
        tensors: list[Tensor],
        module: nn.Module | None = None,
        inputs: Sequence[Tensor] = (),
        phase: str = "forward",
        advice: str = "",
    ) -> bool:
        """Report the first non-finite tensor.

        `module` and `phase` are used if its origin is unknown.  `advice` is for values that the
        optimizer's step has made.
        """
        if self.report is not None or not self.is_active:
            return False
        for tensor in tensors:
            if tensor.dtype not in CHECKED_DTYPES or is_finite(tensor):
                continue
            origin = self._operators.origin_of(tensor)
            origin = origin or _unknown_origin(tensor, module, inputs, phase)
            if origin.is_written:
                continue
            if phase == "backward" and self._pass_over(origin, noticed_in):
                continue
            self.report = self._new_report(origin, noticed_in)
            self.report.advice = advice if origin.phase == "step" else ""
            if self._is_logged:
                logger.error("%s", self.report)
            return True
        return False

    def _pass_over(self, origin: Origin, noticed_in: str) -> bool:
        """Record an overflow that a smaller loss scale cures; False for any other value."""
        if not self._passes_over or not origin.is_absorbed(self._block_scaler):
            return False
        if not self.passed_over or self.passed_over[-1].step != self.step:
            self.passed_over.append(self._new_report(origin, noticed_in))
        return True

    def _new_report(self, origin: Origin, noticed_in: str) -> Report:
        module, code, line = origin.call_site
        return Report(
            module=None if module is None else self._models.names.get(module, ""),
            module_class="" if module is None else type(module).__name__,
            phase=origin.phase,
            where=noticed_in,
            value=origin.value,
            dtype=origin.dtype,
            largest_input=origin.largest_input,
            input_is_finite=origin.input_is_finite,
            step=self.step,
            operator=origin.operator,
            location=location(code, line),
            rank=_rank(),
            loss_scale=None if self._block_scaler is None else self._block_scaler.get(),
            at_scale_1=origin.at_scale_1(self._block_scaler),
        )


def _hooks(parameter: Tensor, check: Callable[[Tensor, Tensor], None]) -> Iterator[Any]:
    """Handles of hooks that call `check(parameter, gradient)`.

    The gradient is checked when it is computed and again in `.grad`, because later hooks of the
    script may replace it.
    """
    reference = weakref.ref(parameter)

    def on_gradient(gradient: Tensor) -> None:
        param = reference()
        if param is not None:
            check(param, gradient)

    def on_accumulated(param: Tensor) -> None:
        if param.grad is not None:
            check(param, param.grad)

    yield parameter.register_hook(on_gradient)
    if parameter.is_leaf:
        yield parameter.register_post_accumulate_grad_hook(on_accumulated)


def _unknown_origin(
    tensor: Tensor, module: nn.Module | None, inputs: Sequence[Tensor], phase: str
) -> Origin:
    value = "nan" if bool(torch.isnan(values(tensor)).any()) else "inf"
    checked = [t for t in inputs if t.dtype in CHECKED_DTYPES]
    call_site = CallSite(module, None, 0)
    are_finite = all(map(is_finite, checked))
    return Origin(
        operator="",
        phase=phase,
        call_site=call_site,
        dtype=tensor.dtype,
        value=value,
        largest_input=largest(checked),
        input_is_finite=are_finite,
        is_written=False,
        order=0,
    )


def _rank() -> int | None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return None
