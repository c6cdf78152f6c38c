"""One optimizer, bound to its master weights; one step path for all opt levels."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .closures import step_with_closure
from .gradient_flow import GradientFlow
from .states import as_dtype, states_of
from .two_step import TwoSteps, has_two_steps

_HALF_TYPES = (torch.float16, torch.bfloat16)


class ManagedOptimizer(GradientFlow):
    """An optimizer whose step looks for overflow and moves half weights along.

    `casts_off` and `casts_on` make the context managers that `step` and its
    closure run in; `after_step(self)` is told of every step, skipped or not.
    `halves` gives the ids of the parameters that are to have masters now.  The
    ranks of `process_group` share their overflow flag.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        casts_off: Callable[[], AbstractContextManager],
        casts_on: Callable[[], AbstractContextManager],
        after_step: Callable[[ManagedOptimizer], None],
        halves: Callable[[], set[int]] = set,
        process_group: Any = None,
    ) -> None:
        super().__init__(optimizer, process_group)
        self.skipped: bool | Tensor = False  # of the last step; a tensor is read when asked
        self.consecutive_skips = 0
        self.is_open = True
        self._casts_off = casts_off
        self._casts_on = casts_on
        self._after_step = after_step
        self._halves = halves
        self._two_steps = TwoSteps(self) if has_two_steps(optimizer) else None
        self._installed: dict[str, tuple[bool, Any, Any]] = {}
        self._found_state: list[tuple[Any, dict]] = []  # to go back, should opening fail

    # Put in, take out

    def install(self, originals: dict[int, Tensor], halves: set[int]) -> None:
        """Move half parameters' places in the optimizer to masters; take over its methods.

        `originals` maps ids of half parameters to the FP32 values they were
        rounded from; only parameters in `halves` (ids) get masters.
        """
        self._found_state = [
            (state, {param: dict(entry) for param, entry in state.items()})
            for state in states_of(self.optimizer)
        ]
        self.adopt_parameters(originals, halves)
        self._replace("step", self._make_step)
        if self._two_steps is not None:
            self._replace("first_step", self._two_steps.make_first)
            self._replace("second_step", self._two_steps.make_second)
        if hasattr(self.optimizer, "zero_grad"):
            self._replace("zero_grad", self._make_zero_grad)

    def adopt_parameters(self, originals: dict[int, Tensor], halves: set[int]) -> None:
        """Put masters in the place of half parameters that the optimizer still holds itself."""
        for group in self.optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                if id(param) not in halves:
                    if id(param) in originals:
                        self._move_state(param, param)
                    continue
                master = self.masters.of(param)
                if master is None:
                    master = self.masters.add(param, originals.get(id(param)))
                    if param.grad is not None:
                        master.grad, param.grad = param.grad.float(), None
                group["params"][index] = master
                self._move_state(param, master)

    def forget_found_state(self) -> None:
        """Opening succeeded: from now on the state is what training makes of it."""
        self._found_state = []

    def adopt_new(self) -> None:
        """Make masters for half parameters that were added, or unfrozen, since."""
        if any(param.dtype in _HALF_TYPES for param in self.parameters()):
            self.adopt_parameters({}, self._halves())

    def release_parameters(self, halves: set[int]) -> None:
        """Put parameters (ids of the model's) back in the place of their masters."""
        for group in self.optimizer.param_groups:
            for index, master in enumerate(group["params"]):
                param = self.masters.half_of(master)
                if param is not None and id(param) in halves:
                    group["params"][index] = param
                    self._move_state(master, param)
                    self.masters.remove(param)

    def fit_state(self, changed: set[int]) -> None:
        """Give the state of parameters (ids) whose dtype has changed their new dtype."""
        for param in self.parameters():
            if id(param) in changed:
                self._move_state(param, param)

    def uninstall(self) -> None:
        """Give the optimizer its own parameters and methods back.

        The caller gives the half parameters their master's values first.
        """
        self.finish_pending()
        self.is_open = False
        self.release_parameters({id(pair.half) for pair in self.masters})
        for name, (had_own, found, put) in self._installed.items():
            own = vars(self.optimizer)
            if own.get(name) is not put:
                continue  # somebody wrapped ours; it passes through from now on
            if had_own:
                own[name] = found
            else:
                del own[name]
        self._installed.clear()

    def restore_found_state(self) -> None:
        """Opening failed half-way: the state is as it was found, to the bit."""
        for state, found in self._found_state:
            state.clear()
            state.update(found)

    def _replace(self, name: str, make: Callable[[Callable], Callable]) -> None:
        """Shadow a method on the instance by a bound method.

        Only a bound method *of the optimizer* is met by LR schedulers built
        before and after: they rebind `step.__func__`.
        """
        own = vars(self.optimizer)
        original = getattr(self.optimizer, name)
        method = types.MethodType(make(original), self.optimizer)
        self._installed[name] = (name in own, own.get(name), method)
        own[name] = method

    def _move_state(self, old: Any, new: Any) -> None:
        for state in states_of(self.optimizer):
            if old in state:
                moved = state.pop(old)
                for key, value in moved.items():
                    if key != "step":
                        moved[key] = as_dtype(value, new.dtype)
                state[new] = moved

    # The step

    def _make_step(self, original: Callable) -> Callable:
        @functools.wraps(getattr(original, "__func__", original))
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.is_open:
                return original(*args, **kwargs)
            return self._step(original, args, kwargs)

        return step

    def _step(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        closure, args, kwargs = _closure(args, kwargs)
        if closure is not None and self._two_steps is not None:
            return self._two_steps.step(original, closure, args, kwargs)
        self.before_step()
        if closure is not None:
            with self._casts_off():
                result = step_with_closure(self, original, closure, args, kwargs)
        else:
            result = self.step_on_gradients(original, args, kwargs)
        self._after_step(self)
        return result

    def before_step(self) -> None:
        """Bring parameters, gradients and scalers up to date."""
        self.forget_found_state()
        self.report_left_scaled()
        self.adopt_new()
        self.settle()
        self.update_deferred()

    def after_step(self, skipped: bool) -> None:
        """A step in halves has ended."""
        self.note_skip(skipped)
        self._after_step(self)

    def step_on_gradients(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """The original step on the gradients there are, or none after an overflow."""
        found = self.take_found_inf()
        if found is not None and getattr(self.optimizer, "_step_supports_amp_scaling", False):
            return self._step_in_kernel(original, args, kwargs, found)
        self.note_skip(found is not None and bool(found.item()))
        if self.skipped:
            return None
        with self._casts_off():
            result = original(*args, **kwargs)
        self.masters.push()
        return result

    def _step_in_kernel(self, original: Callable, args: tuple, kwargs: dict, found: Tensor) -> Any:
        """Fused kernels skip by themselves: the host need not know, and does not wait."""
        self.optimizer.found_inf = found
        self.optimizer.grad_scale = None
        try:
            with self._casts_off():
                result = original(*args, **kwargs)
        finally:
            del self.optimizer.found_inf, self.optimizer.grad_scale
        self.masters.push()
        self.skipped = found
        return result

    def note_skip(self, skipped: bool) -> None:
        """Record whether this step is left out; a scheduler must not think it was forgotten."""
        self.skipped = skipped
        self.consecutive_skips = self.consecutive_skips + 1 if skipped else 0
        if skipped and hasattr(self.optimizer.step, "_wrapped_by_lr_sched"):
            self.optimizer._opt_called = True

    def casts_off(self) -> AbstractContextManager:
        """No casting, for what the optimizer computes."""
        return self._casts_off()

    def casts_on(self) -> AbstractContextManager:
        """Casting as it is outside the step, for the forward in a closure."""
        return self._casts_on()

    def _make_zero_grad(self, original: Callable) -> Callable:
        @functools.wraps(getattr(original, "__func__", original))
        def zero_grad(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_open:
                self.forget_gradients()
            return original(*args, **kwargs)

        return zero_grad


def _closure(args: tuple, kwargs: dict) -> tuple[Callable | None, tuple, dict]:
    """Take the closure out of the arguments of `step`."""
    if args and callable(args[0]):
        return args[0], args[1:], kwargs
    if callable(kwargs.get("closure")):
        rest = {key: value for key, value in kwargs.items() if key != "closure"}
        return kwargs["closure"], args, rest
    return None, args, kwargs
