"""One optimizer and its gradients; one step path for all opt levels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config.opt_levels import HALF_TYPES
from ..config.optimizer_eps import lost_eps
from ..errors import AmpatchError
from ..log import logger
from ..torch_private.optimizers import note_skipped_step
from ..torch_private.zero_redundancy import is_zero
from .gradients import Gradients
from .optimizers import closures, zero
from .optimizers.bare_calls import bare_step, is_bare_zero_grad
from .optimizers.fused import skips_in_kernel
from .optimizers.sam import TwoSteps, has_two_steps
from .optimizers.state import Replaced, put_back
from .optimizers.wrappers import Methods
from .scale_value import is_set
from .step_counts import StepCounter
from .tensor_lists import drop_grads

Loaded = tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]

layouts: list[Callable[[dict[str, Any], Any, Callable[[Tensor], bool]], Loaded]] = []
"""Readers of other packages' checkpoints.  Each takes `(state, optimizer, is_in_half)`, and returns
the state in torch's layout, and parameters with the FP32 values that were saved for them.
"""


class StepOwner(Protocol):
    """What a managed optimizer needs of its session."""

    process_group: Any

    casts_off: Callable[..., Any]
    """`casts_off(function, ...)` calls it without casts, for what the optimizer computes."""

    casts_on: Callable[..., Any]
    """In that: with the casts that hold around the step, for the forward in a closure."""

    def before_step(self, managed: ManagedOptimizer) -> None:
        """A step begins, skipped or not."""

    def after_step(self, managed: ManagedOptimizer) -> None:
        """A step has ended, skipped or not."""

    def looks_for_overflow(self) -> bool:
        """Whether there is a dynamic loss scale."""

    def computes_in_half(self, parameter: Tensor) -> bool:
        """Whether a model computes with half copies of this weight."""


class ManagedOptimizer:
    """An optimizer whose step looks for overflow.

    `gradients` follows them from `scale_loss` to the step, `counter` counts steps.
    """

    def __init__(self, optimizer: Any, session: StepOwner) -> None:
        self.optimizer = optimizer
        self.session = session
        self.gradients = Gradients(optimizer, session.process_group)
        self.parameters = self.gradients.parameters  # an attribute: each step asks
        self.counter = StepCounter()
        self.replaced_state: Replaced = []  # what to put back if `initialize` fails
        self.is_evaluating = False  # `step(closure)` is running
        self.skipped: bool | Tensor = False  # was the last step?  A tensor is read when asked
        self._is_zero = is_zero(optimizer)
        self._has_warned = False
        self._steps = 0
        self._first_dtypes: dict[int, torch.dtype] = {}  # by the ids of parameters
        self._methods = Methods(optimizer)
        self._two_steps = TwoSteps(self) if has_two_steps(optimizer) else None

    # Put in, take out

    def install(self) -> None:
        """Replace the optimizer's methods, for the first time."""
        self._made_half()
        lost = lost_eps(self.optimizer)
        if lost is not None:
            logger.warning(lost)
        self.reinstall()

    def reinstall(self) -> None:
        """Replace the methods again after `uninstall`."""
        self._methods.take_out()
        replacements = {
            "step": self._step,
            "zero_grad": self._zero_grad,
            "load_state_dict": self._load_state_dict,
        }
        if self._two_steps is not None:
            replacements |= {
                "first_step": self._two_steps.first,
                "second_step": self._two_steps.second,
            }
        for name, replacement in replacements.items():
            if hasattr(self.optimizer, name):
                self._methods.put(name, replacement)

    def uninstall(self) -> None:
        """Give the optimizer its own methods back; gradients are left unscaled.

        An `initialize` that fails gives back the state that it has fitted to other dtypes, too.
        """
        try:
            put_back(self.replaced_state)
            self.gradients.finish()
        finally:
            self._methods.take_out()

    # The step

    def _step(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        if args or kwargs:
            found, given, named = closures.replaced(args, kwargs, self._with_casts)
            if found and closures.evaluates_first(self.optimizer):
                with torch.enable_grad():
                    loss = found[0]()
                self._step(original, (), {})
                return loss
            if found:
                return self._step_with_closures(original, given, named)
        self.before_step()
        result = self.step_on_gradients(original, args, kwargs)
        self.after_step()
        return result

    def _step_with_closures(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        if self.session.looks_for_overflow():
            closures.refuse(self.optimizer)
        self.before_step()
        self.is_evaluating = True
        try:
            result = self.session.casts_off(original, *args, **kwargs)
        finally:
            self.is_evaluating = False
        self.note_step(False)
        self.after_step()
        return result

    def _with_casts(self, closure: Callable) -> Callable:
        @functools.wraps(closure)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            loss = self.session.casts_on(closure, *args, **kwargs)
            self.gradients.finish()
            return loss

        return evaluate

    def before_step(self) -> None:
        """Bring gradients and scalers up to date."""
        self.session.before_step(self)
        if self._is_zero and self.session.looks_for_overflow():
            zero.refuse_join(self.optimizer)
        gradients = self.gradients
        if gradients.block is not None:
            raise AmpatchError(
                f"{type(self.optimizer).__name__}.step() inside the ampatch.scale_loss block of "
                "this optimizer: its gradients are still scaled. Call step() after the block."
            )
        if gradients.left_scaled:
            gradients.had_block = True  # the error about that block is enough
            gradients.report_left_scaled()
        gradients.finish()
        self.check_overflow()

    def check_overflow(self) -> None:
        """Bring the overflow flag up to date with the gradients, and scalers with the flag."""
        waiting = list(self.gradients.waiting)
        for deferred in waiting:
            deferred.look_again()
        if not waiting:
            self.gradients.look_again()
        for deferred in waiting:
            deferred.update()

    def after_step(self) -> None:
        """A step has ended that `note_step` has recorded."""
        self.session.after_step(self)
        self.gradients.had_block = False

    def step_on_gradients(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """The original step on the present gradients; no step after an overflow."""
        found = self.gradients.take_found_inf()
        in_kernel = False
        skipped: bool | Tensor = False  # without a flag nothing was checked
        if found is not None:
            in_kernel = isinstance(found, Tensor) and skips_in_kernel(self.optimizer)
            skipped = found if in_kernel or isinstance(found, bool) else is_set(found)
        if skipped is True:
            self.note_step(True)
            return None
        casts_off = self.session.casts_off
        if in_kernel:
            result = casts_off(self._step_in_kernel, original, args, kwargs, found)
        elif args or kwargs or (bare := bare_step(original, self.optimizer)) is None:
            result = casts_off(original, *args, **kwargs)
        else:
            result = casts_off(bare, self.optimizer)
        self.note_step(skipped)
        return result

    def _step_in_kernel(self, original: Callable, args: tuple, kwargs: dict, found: Any) -> Any:
        own = vars(self.optimizer)
        try:
            own.update(found_inf=found, grad_scale=None)
            return original(*args, **kwargs)
        finally:
            for name in ("found_inf", "grad_scale"):
                own.pop(name, None)

    def note_step(self, skipped: bool | Tensor) -> None:
        """Record whether this step is left out; a scheduler must not think it was forgotten."""
        self.skipped = skipped
        self.counter.note(skipped)
        if skipped is True:
            note_skipped_step(self.optimizer)

    def warn_without_block(self) -> None:
        """Say once if the last step came without `scale_loss`, where there is dynamic scaling.

        A step at a learning rate of zero, by which libraries make an optimizer's state, trains
        nothing.
        """
        if self._has_warned or not self.gradients.has_gradients():
            return
        if all(group.get("lr") == 0 for group in self.optimizer.param_groups):
            return
        self._has_warned = True
        logger.warning(
            "%s.step() came without ampatch.scale_loss since its last step, under a dynamic loss "
            "scale: small gradients may be lost and overflow is not looked for. Write "
            "'with ampatch.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()' "
            "before each step.",
            type(self.optimizer).__name__,
        )

    def warn_of_new_half(
        self, names: Callable[[], dict[int, str]], but: Callable[[], set[int]]
    ) -> None:
        """Name parameters that have become half since `initialize`; after steps 1, 2, 4, 8, ...

        `names()` gives names by the ids of parameters, `but()` ids of those that a level has made
        half.
        """
        self._steps += 1
        if self._steps & (self._steps - 1) or not (found := self._made_half()):
            return
        known, left_out = names(), but()
        for position, param in found:
            if id(param) not in left_out:
                logger.warning(
                    "%s: %s, of shape %s, was FP32 and is %s now: the script has written its "
                    ".data, as a loss does that casts its own weight to its inputs' dtype. The "
                    "weight is trained in half, without an FP32 master weight, and small updates "
                    "are lost. Give that code FP32 inputs (embeddings.float()), or have it "
                    "compute with weight.to(x.dtype) and leave .data alone.",
                    *(type(self.optimizer).__name__, known.get(id(param), position)),
                    *(tuple(param.shape), param.dtype),
                )

    def _made_half(self) -> list[tuple[str, Tensor]]:
        """Parameters that were FP32 at the first look and are half, and where; each once."""
        found = []
        for number, group in enumerate(self.optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                first = self._first_dtypes.setdefault(id(param), param.dtype)
                if first is torch.float32 and param.dtype in HALF_TYPES and param.requires_grad:
                    self._first_dtypes[id(param)] = param.dtype
                    found.append((f"param_groups[{number}]['params'][{index}]", param))
        return found

    # The other methods of the optimizer

    def _zero_grad(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        result = None
        if args or kwargs or not is_bare_zero_grad(original, self.optimizer):
            result = original(*args, **kwargs)
        else:
            drop_grads(self.parameters())
        self.gradients.zeroed()
        return result

    def _load_state_dict(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """As the original; reads other `layouts` too, and gives weights the FP32 values in them."""
        if args:
            state, args = args[0], args[1:]
        else:
            kwargs = dict(kwargs)
            state = kwargs.pop("state_dict")
        values: list[tuple[Tensor, Tensor]] = []
        for read in layouts:
            state, more = read(state, self.optimizer, self.session.computes_in_half)
            values += more
        result = original(state, *args, **kwargs)
        with torch.no_grad():
            for param, value in values:
                param.copy_(value)
        return result
