"""The loss scale: static, or dynamic on the device.

Both kinds share `scale`, `snapshot`, `unscale_`, `update`, `get` and `set`.  A
scale of 1 is a static scaler like any other; it only happens to have nothing to
do.  Gradients are unscaled by a snapshot of the scale that their loss was
multiplied by: another block or `set` may have moved the scale since.

The dynamic rule is that of Micikevicius et al. 2018 (arXiv 1710.03740) with
the constants apex and torch.amp settled on: start at 2**16, double after 2000
clean steps, halve on overflow.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

try:
    from torch import _amp_foreach_non_finite_check_and_unscale_ as _check_and_unscale_
except ImportError:

    def _check_and_unscale_(grads: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
        for grad in grads:
            found_inf.logical_or_(~torch.isfinite(grad).all())
            grad.mul_(inverse)


try:
    from torch import _amp_update_scale_ as _update_scale_
except ImportError:

    def _update_scale_(
        scale: Tensor,
        unskipped: Tensor,
        found_inf: Tensor,
        growth: float,
        backoff: float,
        interval: int,
    ) -> None:
        bad = found_inf.bool()
        unskipped.add_(1).mul_((~bad).int())
        grows = unskipped >= interval
        scale.mul_(torch.where(bad, backoff, torch.where(grows, growth, 1.0)))
        unskipped.mul_((~grows).int())


_SMALLEST = 2.0**-126  # below it the reciprocal is no FP32 number


class StaticScaler:
    """A fixed loss scale.  It does not look for overflow, so it costs no host sync."""

    is_dynamic = False

    def __init__(self, value: float = 1.0) -> None:
        self._value = float(value)
        self.generation = 0

    @property
    def is_one(self) -> bool:
        """Whether scaling and unscaling change nothing."""
        return self._value == 1.0

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` in FP32 times the scale."""
        return loss.float() if self.is_one else loss.float() * self._value

    def snapshot(self) -> float:
        """The present scale, for `scale_grads_` and `unscale_`."""
        return self._value

    def scale_grads_(self, grads: list[Tensor], scale: float) -> None:
        """Multiply FP32 gradients by `scale`, in place."""
        if scale != 1.0:
            for _, group in _alike(grads):
                torch._foreach_mul_(group, scale)

    def unscale_(self, grads: list[Tensor], scale: float) -> Tensor | None:
        """Divide FP32 gradients by `scale`, in place.  None: nothing was checked."""
        self.scale_grads_(grads, 1.0 / scale)
        return None

    def defer(self, found_infs: list[Tensor]) -> None:
        """Nothing moves a static scale."""

    def update(self, found_infs: list[Tensor]) -> None:
        """Nothing moves a static scale."""

    def get(self) -> float:
        """The scale."""
        return self._value

    def set(self, value: float) -> None:
        """Another scale from now on."""
        self._value = float(value)
        self.generation += 1

    def state_dict(self) -> dict[str, Any]:
        """apex's format."""
        return {"loss_scale": self._value, "unskipped": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the scale of a `state_dict`, apex's too."""
        self.set(float(state["loss_scale"]))


class DynamicScaler:
    """A loss scale that grows while all is well and backs off on overflow.

    The scale (FP32, 0-dim) and the count of clean steps (int32, 0-dim) live on
    the device of the losses, and nothing here waits for it; `get` does.
    `generation` changes with every update, so that gradients can be told to
    have been scaled by the present value or by an earlier one.
    """

    is_dynamic = True
    is_one = False

    def __init__(
        self,
        *,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        min_loss_scale: float = 2.0**-24,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.growth_interval = growth_interval
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.min_loss_scale = max(min_loss_scale, _SMALLEST)
        self.max_loss_scale = max(max_loss_scale, _SMALLEST)
        self.generation = 0
        self._scale = torch.tensor(self._bounded(init_scale), dtype=torch.float32)
        self._unskipped = torch.tensor(0, dtype=torch.int32)
        self._deferred: list[Tensor] = []

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` in FP32 times the scale.  The scaler moves to the device of the loss."""
        if self._scale.device != loss.device:
            self._scale = self._scale.to(loss.device)
            self._unskipped = self._unskipped.to(loss.device)
        return loss.float() * self.snapshot()  # autograd keeps the factor; ours changes in place

    def snapshot(self) -> Tensor:
        """The present scale, for `scale_grads_` and `unscale_`.  On the device; nothing waits."""
        return self._scale.clone()

    def scale_grads_(self, grads: list[Tensor], scale: Tensor) -> None:
        """Multiply FP32 gradients by `scale`, in place."""
        for device, group in _alike(grads):
            torch._foreach_mul_(group, scale.to(device))

    def unscale_(self, grads: list[Tensor], scale: Tensor) -> Tensor | None:
        """Divide FP32 gradients by `scale`, in place.

        Returns a 0-dim FP32 tensor on the device of `scale`: 1.0 where one of
        the gradients held an inf or NaN, else 0.0.
        """
        found = torch.zeros_like(scale)
        inverse = scale.double().reciprocal().float()
        for device, group in _alike(grads):
            found_here = found if device == found.device else found.to(device)
            _check_and_unscale_(group, found_here, inverse.to(device))
            if found_here is not found:
                found = torch.maximum(found, found_here.to(found.device))
        return found

    def defer(self, found_infs: list[Tensor]) -> None:
        """Keep these flags for the next `update`."""
        known = [*self._deferred, *found_infs]
        self._deferred = known if len(known) < 2 else [torch.stack(known).amax()]

    def update(self, found_infs: list[Tensor]) -> None:
        """Back off if one of the flags is set; else count a clean step, and grow in time."""
        found_infs = [*self._deferred, *found_infs]
        self._deferred.clear()
        if not found_infs:
            return
        found = found_infs[0] if len(found_infs) == 1 else torch.stack(found_infs).amax()
        _update_scale_(
            self._scale,
            self._unskipped,
            found,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
        )
        self._scale.clamp_(self.min_loss_scale, self.max_loss_scale)
        self.generation += 1

    def get(self) -> float:
        """The scale.  Waits for the device."""
        return self._scale.item()

    def set(self, value: float) -> None:
        """Another scale from now on, within the floor and the cap."""
        self._scale.fill_(self._bounded(value))
        self.generation += 1

    def state_dict(self) -> dict[str, Any]:
        """apex's format.  Waits for the device."""
        return {"loss_scale": self.get(), "unskipped": int(self._unskipped.item())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take scale and count of a `state_dict`, apex's too."""
        self.set(float(state["loss_scale"]))
        self._unskipped.fill_(int(state.get("unskipped", 0)))

    def _bounded(self, value: float) -> float:
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"loss scale {value!r}: expected a positive finite number.")
        return min(max(float(value), self.min_loss_scale), self.max_loss_scale)


Scaler = StaticScaler | DynamicScaler


def make_scaler(loss_scale: str | float, **limits: Any) -> Scaler:
    """The scaler for `"dynamic"` or a number; `limits` are `DynamicScaler`'s keywords."""
    return DynamicScaler(**limits) if loss_scale == "dynamic" else StaticScaler(float(loss_scale))


def _alike(grads: list[Tensor]) -> list[tuple[torch.device, list[Tensor]]]:
    """Gradients that one operator takes together: of a device, and sharded or not."""
    groups: dict[tuple[torch.device, type], list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((grad.device, type(grad)), []).append(grad)
    return [(device, group) for (device, _), group in groups.items()]
