"""One optimizer, bound to its master weights; one step path for all opt levels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from ..log import logger
from ..torch_private.optimizers import note_skipped_step
from .gradient_flow import GradientFlow
from .gradient_state import Event, State
from .master_weights import MasterWeights
from .optimizers import zero
from .optimizers.apex_checkpoints import torch_layout
from .optimizers.bare_calls import bare_step, is_bare_zero_grad
from .optimizers.closures import Evaluations, step_with_closure, with_closures
from .optimizers.fused import skips_in_kernel
from .optimizers.idle_steps import IdleSteps
from .optimizers.param_groups import ParamGroups
from .optimizers.sam import TwoSteps, has_two_steps
from .optimizers.state import FoundStates
from .optimizers.wrappers import Methods
from .scale_value import is_set
from .step_counts import StepCounter
from .tensor_lists import any_half, drop_grads


class Casts(Protocol):
    """How an optimizer's step switches the casts of torch's functions."""

    @property
    def off(self) -> AbstractContextManager[None]:
        """Without casts, for what the optimizer computes.  One object, entered again and again."""

    def on(self) -> AbstractContextManager[None]:
        """With casts as they are around the step, for the forward in a closure."""


class ManagedOptimizer:
    """An optimizer whose step looks for overflow and moves half weights along.

    `gradients` are on their way to the step, `masters` are the FP32 weights that it updates,
    `groups` the places of parameters, `counter` counts steps.  `before_step(self)` and
    `after_step(self)` are called around each step, skipped or not.  `halves` gives the ids of
    the parameters that are to have masters now, `master_of` the master that another optimizer
    has made for one of them, `half_of` the parameter of such a master, `held_copy` gives up an
    FP32 copy of one that the user's code holds.  The ranks of `process_group` share their
    overflow flag.  `looks_for_overflow` says whether there is a dynamic loss scale.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        casts: Casts,
        before_step: Callable[[ManagedOptimizer], None],
        after_step: Callable[[ManagedOptimizer], None],
        halves: Callable[[], set[int]] = set,
        master_of: Callable[[Tensor], Parameter | None] = lambda half: None,
        half_of: Callable[[Tensor], Tensor | None] = lambda master: None,
        process_group: Any = None,
        name_of: Callable[[Tensor], str] = lambda half: "a weight",
        held_copy: Callable[[Tensor], Tensor | None] = lambda half: None,
        looks_for_overflow: Callable[[], bool] = lambda: False,
    ) -> None:
        self.optimizer = optimizer
        self.casts = casts
        self.masters = MasterWeights(name_of, held_copy)
        self.gradients = GradientFlow(optimizer, self.masters, process_group)
        self.parameters = self.gradients.parameters  # an attribute: each step asks
        self.groups = ParamGroups(optimizer, self.masters, master_of, half_of)
        self.counter = StepCounter()
        self.found_states = FoundStates()
        self.skipped: bool | Tensor = False  # of the last step; a tensor is read when asked
        self.step_had_block = True  # a `scale_loss` block came before the last step
        self._has_warned = False
        self._before_step, self._after_step = before_step, after_step
        self._halves = halves
        self._looks_for_overflow = looks_for_overflow
        self._methods = Methods(optimizer)
        self._own_methods: dict[str, Callable] = {}
        self._two_steps = TwoSteps(self) if has_two_steps(optimizer) else None
        self._first_step = IdleSteps(optimizer)

    # Put in, take out

    def install(self, originals: dict[int, Tensor], halves: set[int]) -> None:
        """Move half parameters' places in the optimizer to masters; replace its methods.

        `originals` maps ids of half parameters to the FP32 values they were
        rounded from; only parameters in `halves` (ids) get masters.
        """
        self.found_states.note(self.optimizer)
        self.adopt_parameters(originals, halves, {})
        self._put_methods()

    def add_methods(self, methods: dict[str, Callable]) -> None:
        """Have the optimizer have these methods too, which its class asks the instance for."""
        self._own_methods.update(methods)

    def without_methods(self) -> AbstractContextManager:
        """Context manager: the optimizer is without the methods put in here, to be copied."""
        return self._methods.out()

    def reinstall(self) -> None:
        """Replace the methods again after `uninstall`; `adopt_parameters` does the rest."""
        self._methods.take_out()
        self._put_methods()

    def _put_methods(self) -> None:
        answers = {
            "step": self._step,
            "zero_grad": self._zero_grad,
            "load_state_dict": self._load_state_dict,
            "add_param_group": self._add_param_group,
        }
        if self._two_steps is not None:
            answers |= {"first_step": self._two_steps.first, "second_step": self._two_steps.second}
        for name, answer in answers.items():
            if hasattr(self.optimizer, name):
                self._methods.put(name, answer)
        for name, method in self._own_methods.items():
            self._methods.put_own(name, method)

    def adopt_parameters(
        self, originals: dict[int, Tensor], halves: set[int], masters: dict[int, Parameter]
    ) -> None:
        """Put masters in the place of half parameters that the optimizer still holds itself.

        Those in `masters` (by ids of half parameters) exist already.
        """
        if self.groups.put_masters(originals, halves, masters):
            self.gradients.in_halves.watch()

    def add_new_params(self) -> None:
        """Make masters for half parameters that were added, or unfrozen, since."""
        if any_half(self.parameters()):
            halves = self._halves()
            if halves:
                self.adopt_parameters({}, halves, {})

    def show_parameters(self) -> None:
        """Bring `param_groups` up to date for a reader, between forwards, passes and steps.

        Weights that were added have masters then, and masters what was written into half weights
        and what plain passes left there.
        """
        self.add_new_params()
        self.masters.follow_halves()
        self.gradients.in_halves.add_to_masters()

    def release_parameters(self, halves: set[int]) -> None:
        """Put parameters (ids of the model's) back in the place of their masters."""
        if self.groups.put_halves(halves):
            self.gradients.in_halves.watch_anew()

    def uninstall(self) -> None:
        """Give the optimizer its own parameters and methods back.

        The caller gives the half parameters their master's values first.
        """
        try:
            self.gradients.state.finish_pending()
        finally:
            try:
                self.release_parameters({id(pair.half) for pair in self.masters})
            finally:
                self._methods.take_out()

    # The step

    def _step(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        evaluations = None
        if args or kwargs:
            evaluations, args, kwargs = with_closures(self, args, kwargs)
        self.before_step(evaluates=evaluations is not None)
        if evaluations is not None:
            result = self._step_with_closure(original, evaluations, args, kwargs)
        else:
            result = self.step_on_gradients(original, args, kwargs)
        self.after_step()
        return result

    def _step_with_closure(
        self, original: Callable, evaluations: Evaluations, args: tuple, kwargs: dict
    ) -> Any:
        halves = self._two_steps
        with self.casts.off, halves.inside_step(evaluations) if halves else nullcontext():
            return step_with_closure(self, original, evaluations, args, kwargs)

    def before_step(self, evaluates: bool = False) -> None:
        """Bring parameters, gradients and scalers up to date.

        A step that evaluates a closure looks at the gradients after that.
        """
        self._before_step(self)
        state = self.gradients.state
        if state.in_block:
            state.refuse(Event.STEP)
        if self.found_states.known:
            self.found_states.forget()
        if self.gradients.others.left_scaled:
            state.had_block = True  # the error about that block is enough
            self.gradients.others.report()
        self.add_new_params()
        if self.masters.of_one_rank:
            self.masters.agree_on_ranks()
        if state.now is State.PENDING or self.masters.by_half:
            self.bring_up_to_date()
        if not evaluates:
            self.settle_overflow()

    def settle_overflow(self) -> None:
        """Have the overflow flag be that of the gradients as they are now, and scalers know it.

        The ranks that step together decide together.
        """
        waiting = list(self.gradients.state.waiting)
        for deferred in waiting:
            deferred.look_again()
        if not waiting:
            self.gradients.look_again()
        if self.gradients.step_group is not None and self._looks_for_overflow():
            zero.refuse_lead(self.optimizer)
            self.gradients.share_overflow()
        for deferred in waiting:
            deferred.update()

    def bring_up_to_date(self) -> None:
        """Unscale what is pending; have masters follow what was written into half weights.

        Gradients that plain passes left in half weights are added to the masters'.
        """
        self.gradients.state.finish_pending()
        self.masters.sync_from_half()
        self.gradients.in_halves.add_to_masters()

    def after_step(self) -> None:
        """A step, noted as taken or skipped, has ended."""
        state = self.gradients.state
        self.step_had_block, state.had_block = state.had_block, False
        self._after_step(self)

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
        watched = None
        if self.masters.by_half and not self._first_step.is_done:
            watched = self._first_step.before(self.masters)
        try:
            with self.casts.off:
                if in_kernel:
                    result = self._step_in_kernel(original, args, kwargs, found)
                elif args or kwargs or (bare := bare_step(original, self.optimizer)) is None:
                    result = original(*args, **kwargs)
                else:
                    result = bare(self.optimizer)
        finally:  # should it raise half-way, the model follows what was done
            if self.masters.by_half:
                self.masters.push()
        if watched is not None:
            self._first_step.after(watched, skipped)
        self.note_step(skipped)
        return result

    def _step_in_kernel(self, original: Callable, args: tuple, kwargs: dict, found: Any) -> Any:
        self.optimizer.found_inf = found
        self.optimizer.grad_scale = None
        try:
            return original(*args, **kwargs)
        finally:
            del self.optimizer.found_inf, self.optimizer.grad_scale

    def note_step(self, skipped: bool | Tensor) -> None:
        """Record whether this step is left out; a scheduler must not think it was forgotten."""
        self.skipped = skipped
        self.counter.note(skipped)
        if skipped is True:
            note_skipped_step(self.optimizer)

    def warn_without_block(self) -> None:
        """Say once if the last step came without `scale_loss`, where there is dynamic scaling."""
        if self.step_had_block or self._has_warned or not self.gradients.has_gradients():
            return
        self._has_warned = True
        logger.warning(
            "%s.step() came without ampatch.scale_loss since its last step, under a dynamic loss "
            "scale: small gradients may be lost and overflow is not looked for. Write "
            "'with ampatch.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()' "
            "before each step.",
            type(self.optimizer).__name__,
        )

    # The other methods of the optimizer

    def _zero_grad(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        self.gradients.zeroed()
        if args or kwargs or not is_bare_zero_grad(original, self.optimizer):
            return original(*args, **kwargs)
        for group in self.optimizer.param_groups:
            drop_grads(group["params"])
        return None

    def _add_param_group(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """As the original, which knows of masters and not of their half weights."""
        self.groups.refuse_twice(args[0] if args else kwargs.get("param_group"))
        return original(*args, **kwargs)

    def _load_state_dict(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """As the original; understands apex's layouts, whose masters' values the masters get."""
        self.add_new_params()
        self.masters.sync_from_half()
        if args:
            state, args = args[0], args[1:]
        else:
            kwargs = dict(kwargs)
            state = kwargs.pop("state_dict")
        state, values = torch_layout(
            state, self.optimizer, lambda p: self.masters.half_of(p) is not None
        )
        result = original(state, *args, **kwargs)
        with torch.no_grad():
            for param, value in values:
                param.copy_(value)
        if values:
            self.masters.push()
        return result
