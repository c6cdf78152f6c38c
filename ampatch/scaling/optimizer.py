"""One optimizer, bound to its master weights; one step path for all opt levels."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..log import logger
from ..torch_private.optimizers import note_skipped_step
from .gradient_flow import GradientFlow
from .optimizers import parameter_lists
from .optimizers.apex_checkpoints import torch_layout
from .optimizers.bare_calls import bare_step, is_bare_zero_grad
from .optimizers.closures import Evaluations, step_with_closure, with_closures
from .optimizers.fused import skips_in_kernel
from .optimizers.idle_steps import IdleSteps
from .optimizers.sam import TwoSteps, has_two_steps
from .optimizers.snapshots import WeightsAndState
from .optimizers.state import FoundStates, move_state
from .optimizers.wrappers import Methods
from .scale_value import is_set
from .step_counts import StepCounter

_HALF_TYPES = frozenset((torch.float16, torch.bfloat16))
_dtype_of = operator.attrgetter("dtype")


class ManagedOptimizer(GradientFlow):
    """An optimizer whose step looks for overflow and moves half weights along.

    `casts_off` and `casts_on` make the context managers that `step` and its
    closure run in, and `resume_casts(suspend_casts())` does what the first does in fewer calls;
    `after_step(self)` is told of every step, skipped or not.
    `halves` gives the ids of the parameters that are to have masters now,
    `master_of` the master that another optimizer has made for one of them.  The
    ranks of `process_group` share their overflow flag.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        suspend_casts: Callable[[], Any],
        resume_casts: Callable[[Any], None],
        casts_off: Callable[[], AbstractContextManager],
        casts_on: Callable[[], AbstractContextManager],
        after_step: Callable[[ManagedOptimizer], None],
        halves: Callable[[], set[int]] = set,
        master_of: Callable[[Tensor], Parameter | None] = lambda half: None,
        process_group: Any = None,
        name_of: Callable[[Tensor], str] = lambda half: "a weight",
    ) -> None:
        super().__init__(optimizer, process_group, name_of)
        self.skipped: bool | Tensor = False  # of the last step; a tensor is read when asked
        self.counter = StepCounter()
        self._told_unfed = False
        self.was_fed = True  # a `scale_loss` block came since the step before the last
        self._suspend_casts = suspend_casts
        self._resume_casts = resume_casts
        self._casts_off = casts_off
        self._casts_on = casts_on
        self._after_step = after_step
        self._halves = halves
        self._master_of = master_of
        self._methods = Methods(optimizer)
        self._own_methods: dict[str, Callable] = {}
        self._two_steps = TwoSteps(self) if has_two_steps(optimizer) else None
        self._found_states = FoundStates()
        self._first_step = IdleSteps(optimizer)

    # Put in, take out

    def install(self, originals: dict[int, Tensor], halves: set[int]) -> None:
        """Move half parameters' places in the optimizer to masters; take over its methods.

        `originals` maps ids of half parameters to the FP32 values they were
        rounded from; only parameters in `halves` (ids) get masters.
        """
        self._found_states.note(self.optimizer)
        self.adopt_parameters(originals, halves, {})
        self._put_methods()

    def add_methods(self, methods: dict[str, Callable]) -> None:
        """Have the optimizer have these methods too, which its class asks the instance for."""
        self._own_methods.update(methods)

    def without_methods(self) -> AbstractContextManager:
        """Context manager: the optimizer is without methods of ours, for who copies it."""
        return self._methods.out()

    def reinstall(self) -> None:
        """Take over the methods again after `uninstall`; `adopt_parameters` does the rest."""
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
        parameter_lists.check(self.optimizer, halves)
        new_of: dict[int, Tensor] = {}
        for group in self.optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                if id(param) not in halves:
                    if id(param) in originals:
                        move_state(self.optimizer, param, param)
                    continue
                master = self.masters.of(param)
                if master is None:
                    original = originals.get(id(param))
                    known = masters.get(id(param), self._master_of(param))
                    self.masters.is_shared = self.masters.is_shared or known is not None
                    master = self.masters.add(param, original, known)
                group["params"][index] = new_of[id(param)] = master
                move_state(self.optimizer, param, master)
        parameter_lists.exchange(self.optimizer, new_of)
        if new_of:
            self.watch_arrivals()

    def forget_found_state(self) -> None:
        """Opening succeeded: from now on the state is what training makes of it."""
        self._found_states.forget()

    def adopt_new(self) -> None:
        """Make masters for half parameters that were added, or unfrozen, since."""
        if not _HALF_TYPES.isdisjoint(map(_dtype_of, self.parameters())):
            halves = self._halves()
            if halves:
                self.adopt_parameters({}, halves, {})

    def release_parameters(self, halves: set[int]) -> None:
        """Put parameters (ids of the model's) back in the place of their masters."""
        old_of: dict[int, Tensor] = {}
        for group in self.optimizer.param_groups:
            for index, master in enumerate(group["params"]):
                param = self.masters.half_of(master)
                if param is not None and id(param) in halves:
                    group["params"][index] = old_of[id(master)] = param
                    move_state(self.optimizer, master, param)
                    self.masters.remove(param)
        parameter_lists.exchange(self.optimizer, old_of)
        if old_of:
            self.watch_anew()

    def fit_state(self, changed: set[int]) -> None:
        """Give the state of parameters (ids) whose dtype has changed their new dtype."""
        for param in self.parameters():
            if id(param) in changed:
                move_state(self.optimizer, param, param)

    def uninstall(self) -> None:
        """Give the optimizer its own parameters and methods back.

        The caller gives the half parameters their master's values first.
        """
        try:
            self.finish_pending()
        finally:
            try:
                self.release_parameters({id(pair.half) for pair in self.masters})
            finally:
                self._methods.take_out()

    def restore_found_state(self) -> None:
        """Opening failed half-way: the state is as it was found, to the bit."""
        self._found_states.restore()

    # The step

    def _step(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        self.before_step()
        if args or kwargs:
            result = self._step_with_arguments(original, args, kwargs)
        else:
            result = self.step_on_gradients(original, args, kwargs)
        self.after_step()
        return result

    def _step_with_arguments(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        evaluations = Evaluations(self)
        has_closure, given, named = with_closures(evaluations, args, kwargs)
        if not has_closure:
            return self.step_on_gradients(original, args, kwargs)
        halves = self._two_steps
        with self._casts_off(), halves.inside_step(evaluations) if halves else nullcontext():
            return step_with_closure(self, original, evaluations, given, named)

    def snapshot(self) -> WeightsAndState:
        """All that the optimizer updates and remembers, to go back to."""
        return WeightsAndState(self.optimizer)

    def before_step(self) -> None:
        """Bring parameters, gradients and scalers up to date."""
        if self.in_block:
            self.refuse_step_in_block()
        if self._found_states.known:
            self.forget_found_state()
        if self.left_scaled.known:  # about those more is to be said
            self._fed = True
            self.left_scaled.report()
        self.adopt_new()
        if self.pending is not None or self.masters.by_half:
            self.settle()
        if self._deferred:
            self.update_deferred()

    def after_step(self) -> None:
        """A step, noted as taken or skipped, has ended."""
        self.was_fed, self._fed = self._fed, False
        self._after_step(self)

    def step_on_gradients(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """The original step on the gradients there are, or none after an overflow."""
        found = self.take_found_inf()
        in_kernel = False
        skipped: bool | Tensor = False  # without a flag nothing was checked
        if found is not None:
            in_kernel = isinstance(found, Tensor) and skips_in_kernel(self.optimizer)
            skipped = found if in_kernel else is_set(found)
        if skipped is True:
            self.note_step(True)
            return None
        watched = None
        if self.masters.by_half and not self._first_step.is_done:
            watched = self._first_step.before(self.masters)
        suspended = self._suspend_casts()
        try:
            if in_kernel:
                result = self._step_in_kernel(original, args, kwargs, found)
            elif args or kwargs or (bare := bare_step(original, self.optimizer)) is None:
                result = original(*args, **kwargs)
            else:
                result = bare(self.optimizer)
        finally:  # should it raise half-way, the model follows what was done
            self._resume_casts(suspended)
            if self.masters.by_half:
                self.masters.push()
        if watched is not None:
            self._first_step.after(watched, skipped)
        self.note_step(skipped)
        return result

    def _step_in_kernel(self, original: Callable, args: tuple, kwargs: dict, found: Tensor) -> Any:
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

    def report_unfed(self) -> None:
        """Say once if the last step came without `scale_loss`, where there is dynamic scaling."""
        if self.was_fed or self._told_unfed or not self.has_gradients():
            return
        self._told_unfed = True
        logger.warning(
            "%s.step() came without ampatch.scale_loss since its last step, under a dynamic loss "
            "scale: small gradients may be lost and overflow is not looked for. Write "
            "'with ampatch.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()' "
            "before each step.",
            type(self.optimizer).__name__,
        )

    def casts_off(self) -> AbstractContextManager:
        """No casting, for what the optimizer computes."""
        return self._casts_off()

    def casts_on(self) -> AbstractContextManager:
        """Casting as it is outside the step, for the forward in a closure."""
        return self._casts_on()

    def _zero_grad(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        self.forget_gradients()
        if args or kwargs or not is_bare_zero_grad(original, self.optimizer):
            return original(*args, **kwargs)
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                param.grad = None
        return None

    def _add_param_group(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """As the original, which knows of masters and not of their half weights."""
        group = args[0] if args else kwargs.get("param_group")
        params = group.get("params") if isinstance(group, dict) else None
        if params is not None:
            given = group["params"] = [params] if isinstance(params, Tensor) else list(params)
            held = set(map(id, self.parameters()))
            for param in given:
                param = param[1] if isinstance(param, tuple) else param
                if id(self.masters.of(param)) in held:
                    raise ValueError(
                        "some parameters appear in more than one parameter group: "
                        f"{type(self.optimizer).__name__}.add_param_group was given a half weight "
                        f"of shape {tuple(param.shape)} whose FP32 master it has already."
                    )
        return original(*args, **kwargs)

    def _load_state_dict(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """As the original; understands apex's layouts, and takes their masters' values over."""
        self.adopt_new()
        self.masters.settle()
        if args:
            state, args = args[0], args[1:]
        else:
            kwargs = dict(kwargs)
            state = kwargs.pop("state_dict")
        state, values = torch_layout(
            state, self.optimizer.param_groups, lambda p: self.masters.half_of(p) is not None
        )
        result = original(state, *args, **kwargs)
        with torch.no_grad():
            for param, value in values:
                param.copy_(value)
        if values:
            self.masters.push()
        return result
