"""One optimizer, bound to its master weights; one step path for all opt levels.

Gradients of a managed optimizer are unscaled and complete in `.grad` of the
tensors in `param_groups` (the masters, or the FP32 parameters themselves)
whenever `scale_loss` is not running, except after `delay_unscale=True`: then
they are *pending*, scaled by a scaler at a known generation, until the next
`scale_loss` or the step finishes them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..errors import AmpatchError
from .closures import step_with_closure
from .loss_scaler import Scaler
from .master_weights import MasterWeights, _world_size
from .pending import Pending

_HALF_TYPES = (torch.float16, torch.bfloat16)


class ManagedOptimizer:
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
        self.optimizer = optimizer
        self.masters = MasterWeights()
        self.skipped: bool | Tensor = False  # of the last step; a tensor is read when asked
        self.consecutive_skips = 0
        self.is_open = True
        self._casts_off = casts_off
        self._casts_on = casts_on
        self._after_step = after_step
        self.pending: Pending | None = None
        self._halves = halves
        self._process_group = process_group
        self._found_inf: Tensor | None = None
        self._deferred: Scaler | None = None  # its update waits for the step
        self._in_block = False
        self._aside: list[tuple[Tensor, Tensor]] = []
        self._installed: dict[str, tuple[bool, Any, Any]] = {}
        self._found_state: list[tuple[Any, dict]] | None = None  # to go back, should opening fail

    # Put in, take out

    def install(self, originals: dict[int, Tensor], halves: set[int]) -> None:
        """Move half parameters' places in the optimizer to masters; take over its methods.

        `originals` maps ids of half parameters to the FP32 values they were
        rounded from; only parameters in `halves` (ids) get masters.
        """
        state = getattr(self.optimizer, "state", None)
        if state is not None:
            self._found_state = [(param, dict(entry)) for param, entry in state.items()]
        self.adopt_parameters(originals, halves)
        self._replace("step", self._make_step)
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
        self._found_state = None

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
        if self._found_state is not None:
            self.optimizer.state.clear()
            self.optimizer.state.update(self._found_state)

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
        state = getattr(self.optimizer, "state", None)
        if state is not None and old in state:
            moved = state.pop(old)
            for key, value in moved.items():
                if key != "step":
                    moved[key] = _as_dtype(value, new.dtype)
            state[new] = moved

    # Gradients

    def parameters(self) -> Iterator[Tensor]:
        """The tensors the optimizer updates: masters, or the parameters themselves."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def settle(self) -> None:
        """Bring all up to date: half weights written from outside, gradients left anywhere."""
        self.finish_pending()
        self.masters.settle()
        self.take_unscaled()

    def adopt_new(self) -> None:
        """Make masters for half parameters that were added, or unfrozen, since."""
        if any(param.dtype in _HALF_TYPES for param in self.parameters()):
            self.adopt_parameters({}, self._halves())

    def refuse_nesting(self) -> None:
        """Raise `AmpatchError` inside another `scale_loss` block for the same optimizer."""
        if self._in_block:
            raise AmpatchError(
                f"ampatch.scale_loss(..., <{type(self.optimizer).__name__}>): this optimizer is "
                "already in an enclosing scale_loss block. Leave that block first; the gradients "
                "of several blocks add up until the step."
            )

    def finish_other(self, scaler: Scaler) -> None:
        """Unscale what is pending, unless `scaler`, as it is now, may add to it."""
        if self.pending is not None and not self.pending.is_scaled_by(scaler):
            self.pending.finish()

    def before_backward(self, scaler: Scaler, scale: Any) -> None:
        """Make room for gradients scaled by `scale`: set aside, or scale, what is there."""
        self._in_block = True
        self.masters.settle()
        self.take_unscaled()
        held = [param for param in self.parameters() if param.grad is not None]
        if not held:
            self.pending = self._found_inf = None
        elif _world_size() > 1:
            self._put_back_scaled(held, scaler, scale)
        else:  # what backward adds must be told from what was there
            self._aside = [
                (param, param.grad) for param in held if self.masters.half_of(param) is None
            ]
            for param, _ in self._aside:
                param.grad = None

    def _put_back_scaled(self, held: list[Tensor], scaler: Scaler, scale: Any) -> None:
        """Leave earlier gradients where backward adds to them, so one all-reduce serves both."""
        if self.pending is None:
            scaler.scale_grads_(_values([param.grad for param in held]), scale)
            self.pending = Pending(scaler, scale)
            self.pending.join(self)
        for param in held:
            half = self.masters.half_of(param)
            if half is not None:
                half.grad, param.grad = param.grad.to(half.dtype), None

    def after_backward(
        self, scaler: Scaler, scale: Any, *, defer_update: bool = False
    ) -> Tensor | None:
        """Unscale the new gradients and add them to the earlier ones; returns found_inf."""
        self._in_block = False
        fresh = self.masters.take_grads()
        if self.pending is not None:
            self.pending = None
            self._add_to_masters(fresh)
            self._add_aside()
            found = self._unscale(scaler, self._all_grads(), scale)
        else:
            own = [
                param.grad
                for param in self.parameters()
                if param.grad is not None and self.masters.half_of(param) is None
            ]
            found = self._unscale(scaler, [*own, *fresh.values()], scale)
            self._add_to_masters(fresh)
            self._add_aside()
        self._deferred = scaler if defer_update else None
        return found

    def leave_scaled(self, pending: Pending, scaler: Scaler) -> None:
        """`delay_unscale`: bring everything to the scaler's scale and leave it there."""
        self._in_block = False
        fresh = self.masters.take_grads()
        if self.pending is None:
            earlier = [pair.master.grad for pair in self.masters if pair.master.grad is not None]
            aside = [grad for _, grad in self._aside]
            scaler.scale_grads_(_values([*earlier, *aside]), pending.scale)
        self._add_to_masters(fresh)
        self._add_aside()
        self.pending = pending
        pending.join(self)

    def abandon_backward(self) -> None:
        """The backward pass failed: drop what it left, put back what was there.

        With several ranks the earlier gradients are where backward added to
        them; they stay, and what the failed pass added stays with them.
        """
        self._in_block = False
        fresh = self.masters.take_grads()
        if _world_size() > 1:
            self._add_to_masters(fresh)
            return
        for param in self.parameters():
            if self.masters.half_of(param) is None:
                param.grad = None
        for param, grad in self._aside:
            param.grad = grad
        self._aside = []

    def finish_pending(self) -> None:
        """Unscale what `delay_unscale` left scaled."""
        if self.pending is not None:
            self.pending.finish()

    def unscale_pending(self, scaler: Scaler) -> Tensor | None:
        """This optimizer's part of `Pending.finish`; returns found_inf."""
        scale, self.pending = self.pending.scale, None
        return self._unscale(scaler, self._all_grads(), scale)

    def _unscale(self, scaler: Scaler, grads: list[Tensor], scale: Any) -> Tensor | None:
        found = scaler.unscale_(_values(grads), scale)
        if found is None:
            return None
        if self._process_group is not None:
            torch.distributed.all_reduce(
                found, torch.distributed.ReduceOp.MAX, group=self._process_group
            )
        known = self._found_inf
        self._found_inf = found if known is None else torch.maximum(known, found.to(known.device))
        return found

    def forget_gradients(self) -> None:
        """All gradients were zeroed: nothing is pending, no overflow is remembered."""
        self.pending = self._found_inf = None
        self.masters.drop_grads()

    def forget_overflow(self, zeroed: set[int]) -> None:
        """Forget an overflow if no gradients are left; `zeroed` are ids of model parameters."""
        if self._found_inf is not None and all(
            param.grad is None or id(param) in zeroed or id(self.masters.half_of(param)) in zeroed
            for param in self.parameters()
        ):
            self._found_inf = None

    def take_unscaled(self) -> None:
        """Gradients that a plain `loss.backward()` left in half weights count as unscaled."""
        if self.masters.has_grads():
            self.finish_pending()
            self._add_to_masters(self.masters.take_grads())

    def _all_grads(self) -> list[Tensor]:
        return [param.grad for param in self.parameters() if param.grad is not None]

    def _add_to_masters(self, fresh: dict[int, Tensor]) -> None:
        for pair in self.masters:
            grad = fresh.get(id(pair.master))
            if grad is None:
                continue
            pair.master.grad = grad if pair.master.grad is None else pair.master.grad.add_(grad)

    def _add_aside(self) -> None:
        for param, grad in self._aside:
            param.grad = grad if param.grad is None else grad.add_(param.grad)
        self._aside = []

    # The step

    def _make_step(self, original: Callable) -> Callable:
        @functools.wraps(getattr(original, "__func__", original))
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.is_open:
                return original(*args, **kwargs)
            return self._step(original, args, kwargs)

        return step

    def _step(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        self.forget_found_state()
        self.adopt_new()
        self.settle()
        if self._deferred is not None:
            self._deferred.update([])
            self._deferred = None
        closure, args, kwargs = _closure(args, kwargs)
        if closure is not None:
            with self._casts_off():
                result = step_with_closure(self, original, closure, args, kwargs)
        else:
            result = self.step_on_gradients(original, args, kwargs)
        self._after_step(self)
        return result

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

    def casts_on(self) -> AbstractContextManager:
        """Casting as it is outside the step, for the forward in a closure."""
        return self._casts_on()

    def take_found_inf(self) -> Tensor | None:
        """The overflow flag of the gradients gathered since it was last taken; None: unchecked."""
        found, self._found_inf = self._found_inf, None
        return found

    def _make_zero_grad(self, original: Callable) -> Callable:
        @functools.wraps(getattr(original, "__func__", original))
        def zero_grad(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_open:
                self.forget_gradients()
            return original(*args, **kwargs)

        return zero_grad


def _as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """A piece of optimizer state, a tensor or a list of them (LBFGS), in another dtype."""
    if isinstance(value, list):
        return [_as_dtype(item, dtype) for item in value]
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


def _values(grads: list[Tensor]) -> list[Tensor]:
    """The tensors that hold the numbers: of a sparse gradient its values, coalesced."""
    return [grad._values() if grad.is_sparse else grad for grad in grads]


def _closure(args: tuple, kwargs: dict) -> tuple[Callable | None, tuple, dict]:
    """Take the closure out of the arguments of `step`."""
    if args and callable(args[0]):
        return args[0], args[1:], kwargs
    if callable(kwargs.get("closure")):
        rest = {key: value for key, value in kwargs.items() if key != "closure"}
        return kwargs["closure"], args, rest
    return None, args, kwargs
