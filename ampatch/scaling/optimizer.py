"""One optimizer and its gradients; one step path for all opt levels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config.optimizer_eps import lost_eps
from ..errors import AmpatchError
from ..log import logger
from ..torch_private.optimizers import (
    is_bare_zero_grad,
    is_zero_redundancy,
    record_skipped_step,
    unwrapped_step,
)
from .delayed import run_pending_updates, unscale_delayed
from .gradients import GradState, OptimizerGradients
from .optimizers import closures, zero_redundancy
from .optimizers.fused import prepare_skip_in_kernel
from .optimizers.sam import TwoSteps, has_two_steps
from .optimizers.state import ReplacedValues, restore_state
from .optimizers.wrappers import ReplacedMethods
from .scale_value import is_set
from .steps import StepCounter, StepReports

LoadedState = tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]

checkpoint_readers: list[
    Callable[[dict[str, Any], Any, Callable[[Tensor], bool]], LoadedState]
] = []
"""Readers of other packages' checkpoints.  Each takes `(state, optimizer, computes_in_half)`, and
returns the state in torch's layout, and parameters with the FP32 values that were saved for them.
"""


class SessionForOptimizer(Protocol):
    """The part of a session that a managed optimizer uses."""

    process_group: Any
    observers: Any  # the observers of steps; `observers.registered` is empty if there are none

    call_without_casts: Callable[..., Any]
    """`call_without_casts(function, ...)` calls a function without casts: the optimizer's step."""

    call_with_outer_casts: Callable[..., Any]
    """`call_with_outer_casts(closure, ...)` calls a closure, inside `call_without_casts`, with the
    casts that were active before."""

    def after_step(self, managed: ManagedOptimizer) -> None:
        """Called after each step, skipped or not."""

    def checks_for_overflow(self) -> bool:
        """Whether there is a dynamic loss scale."""

    def computes_in_half(self, parameter: Tensor) -> bool:
        """Whether a model computes with half copies of this weight."""


class ManagedOptimizer:
    """An optimizer whose step is skipped after an overflow.

    `gradients` follows the gradients from `scale_loss` to the step, `counter` counts the steps, and
    `reports` logs messages about them.
    """

    def __init__(self, optimizer: Any, session: SessionForOptimizer) -> None:
        self.optimizer = optimizer
        self.session = session
        self.gradients = OptimizerGradients(optimizer, session.process_group)
        self.parameters = self.gradients.parameters  # bound once: read in every step
        self.counter = StepCounter()
        self.reports = StepReports(optimizer, self.gradients, self.counter)
        self.replaced_state: ReplacedValues = []  # put back if `initialize` fails
        self.is_evaluating = False  # `step(closure)` is running
        # Whether the last step was skipped.  A tensor is read late, because reading synchronizes.
        self.last_step_skipped: bool | Tensor = False
        self._is_zero_redundancy = is_zero_redundancy(optimizer)
        self._methods = ReplacedMethods(optimizer)
        # `first_step` and `second_step` of SAM.
        self._two_steps = TwoSteps(self) if has_two_steps(optimizer) else None

    # Replaced methods

    def install(self) -> None:
        """Replace the optimizer's methods, for the first time."""
        self.reports.record_dtypes()
        lost = lost_eps(self.optimizer)
        if lost is not None:
            logger.warning(lost)
        self.reinstall()

    def reinstall(self) -> None:
        """Replace the methods again after `uninstall`."""
        self._methods.restore()
        replacements = {
            "step": self._step,
            "zero_grad": self._zero_grad,
            "load_state_dict": self._load_state_dict,
        }
        if self._two_steps is not None:
            replacements |= {
                "first_step": self._two_steps.first_step,
                "second_step": self._two_steps.second_step,
            }
        for name, replacement in replacements.items():
            if hasattr(self.optimizer, name):
                self._methods.replace(name, replacement)

    def uninstall(self) -> None:
        """Give the optimizer its own methods back, and unscale gradients that are still scaled.

        After an `initialize` that failed, also give its state its former dtypes back.
        """
        try:
            restore_state(self.replaced_state)
            unscale_delayed(self.gradients)
        finally:
            self._methods.restore()

    # The step

    def _step(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        if args or kwargs:
            script_closures, new_args, new_kwargs = closures.wrap_closures(
                args, kwargs, self._wrap_closure
            )
            if script_closures and closures.evaluates_closure_first(self.optimizer):
                with torch.enable_grad():
                    loss = script_closures[0]()
                self._step(original, (), {})
                return loss
            if script_closures:
                return self._step_with_closures(original, new_args, new_kwargs)
        self.before_step()
        result = self.step_unless_overflow(original, args, kwargs)
        self.after_step()
        return result

    def _step_with_closures(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        if self.session.checks_for_overflow():
            closures.refuse_closure(self.optimizer)
        self.before_step()
        self.is_evaluating = True
        try:
            result = self.session.call_without_casts(original, *args, **kwargs)
        finally:
            self.is_evaluating = False
        self.record_step(False)
        self.after_step()
        return result

    def _wrap_closure(self, closure: Callable) -> Callable:
        """Run the closure with the casts around the step, then unscale what it left scaled."""

        @functools.wraps(closure)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            loss = self.session.call_with_outer_casts(closure, *args, **kwargs)
            unscale_delayed(self.gradients)
            return loss

        return evaluate

    def before_step(self) -> None:
        """Unscale and recheck gradients, and run the pending updates of scalers."""
        if self.session.observers.registered:
            self.session.observers.notify("on_step_begin", self.optimizer)
        if self._is_zero_redundancy and self.session.checks_for_overflow():
            zero_redundancy.refuse_join(self.optimizer)
        gradients = self.gradients
        if gradients.scaled_by_other_block:
            # No second message about a missing block: the next line logs an error.
            gradients.had_block = True
            gradients.report_scaled_by_other_block()
        if gradients.state is GradState.SCALED:
            if gradients.block is not None:
                raise AmpatchError(
                    f"{type(self.optimizer).__name__}.step() inside the ampatch.scale_loss block "
                    "of this optimizer: its gradients are still scaled. Call step() after the "
                    "block."
                )
            unscale_delayed(gradients)
        if gradients.pending_updates:
            run_pending_updates(gradients)
        else:
            gradients.recheck()

    def after_step(self) -> None:
        """Finish a step; to be called after `record_step`."""
        self.session.after_step(self)
        self.gradients.had_block = False

    def step_unless_overflow(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """Call the original step, unless the present gradients have overflowed."""
        found_inf = self.gradients.take_found_inf()
        in_kernel = False
        skipped: bool | Tensor = False
        if found_inf is not None:
            in_kernel = isinstance(found_inf, Tensor) and prepare_skip_in_kernel(self.optimizer)
            skipped = found_inf if in_kernel or isinstance(found_inf, bool) else is_set(found_inf)
        if skipped is True:
            self.record_step(True)
            return None
        call_without_casts = self.session.call_without_casts
        if in_kernel:
            result = call_without_casts(self._step_in_kernel, original, args, kwargs, found_inf)
        elif args or kwargs or (bare := unwrapped_step(original, self.optimizer)) is None:
            result = call_without_casts(original, *args, **kwargs)
        else:
            result = call_without_casts(bare, self.optimizer)
        self.record_step(skipped)
        return result

    def _step_in_kernel(self, original: Callable, args: tuple, kwargs: dict, found_inf: Any) -> Any:
        attributes = vars(self.optimizer)
        try:
            attributes.update(found_inf=found_inf, grad_scale=None)
            return original(*args, **kwargs)
        finally:
            for name in ("found_inf", "grad_scale"):
                attributes.pop(name, None)

    def record_step(self, skipped: bool | Tensor) -> None:
        """Record whether this step is skipped."""
        self.last_step_skipped = skipped
        self.counter.record(skipped)
        if skipped is True:
            # Otherwise LR schedulers would warn that `optimizer.step()` was not called.
            record_skipped_step(self.optimizer)

    # The other methods of the optimizer

    def _zero_grad(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        result = None
        if args or kwargs or not is_bare_zero_grad(original, self.optimizer):
            result = original(*args, **kwargs)
        else:
            for param in self.parameters():
                param.grad = None
        self.gradients.on_zero_grad()
        return result

    def _load_state_dict(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """Load a state, and copy FP32 values that `checkpoint_readers` find to the weights."""
        if args:
            state, args = args[0], args[1:]
        else:
            kwargs = dict(kwargs)
            state = kwargs.pop("state_dict")
        values: list[tuple[Tensor, Tensor]] = []
        for read in checkpoint_readers:
            state, read_values = read(state, self.optimizer, self.session.computes_in_half)
            values += read_values
        result = original(state, *args, **kwargs)
        with torch.no_grad():
            for param, value in values:
                param.copy_(value)
        return result
