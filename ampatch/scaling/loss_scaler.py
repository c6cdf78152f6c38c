"""The loss scale: static, or dynamic.

A scale of 1 is a static scaler that has nothing to do.  Gradients are unscaled by a
snapshot of the scale that their loss was multiplied by: another block or `set` may have changed
the scale since.  A static scale is a number, a dynamic one a 0-dim tensor on the device of the
losses; how it moves is in `scale_value`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..config.opt_levels import HALF_TYPES
from ..config.scale_settings import SETTINGS, ScaleSettings, invertible
from ..log import logger
from ..torch_private import foreach
from ..torch_private.devices import is_owned_by_host
from .scale_value import Flag, Numbers, alike, either, is_set
from .scaler_entries import checked_entry

_HALF = frozenset(HALF_TYPES)
_dtype = operator.attrgetter("dtype")


def _multiply(grads: list[Tensor], scale: Any) -> None:
    """Multiply gradients, in place.

    On the CPU torch rounds a number to the dtype of the list: 65536 would be inf for float16.  A
    tensor keeps its own.
    """
    for device, group in alike(grads):
        if isinstance(scale, Tensor):
            foreach.mul_(group, scale.to(device))
        elif is_owned_by_host(device) and not _HALF.isdisjoint(map(_dtype, group)):
            foreach.mul_(group, torch.tensor(scale, dtype=torch.float64, device=device))
        else:
            foreach.mul_(group, scale)


class StaticScaler:
    """A fixed loss scale.  It does not look for overflow, so it costs no host sync.

    `is_needed` says whether gradients may be too small for their type without a scale, as they are
    in float16.
    """

    is_dynamic = False
    settings = None

    def __init__(self, value: float = 1.0, is_needed: bool = True) -> None:
        self._value = invertible(value)
        self._is_needed = is_needed
        self.generation = 0

    @property
    def is_one(self) -> bool:
        """Whether scaling and unscaling change nothing."""
        return self._value == 1.0

    def scale(self, loss: Tensor) -> tuple[Tensor, float]:
        """`loss` in FP32 times the scale, and that scale."""
        return (loss.float() if self.is_one else loss.float() * self._value), self._value

    def get(self) -> float:
        """The scale; nothing waits."""
        return self._value

    snapshot = peek = get

    def scale_grads_(self, grads: list[Tensor], scale: float) -> None:
        """Multiply gradients by `scale`, in place."""
        if scale != 1.0:
            _multiply(grads, scale)

    def unscale_(self, grads: list[Tensor], scale: float) -> None:
        """Divide gradients by `scale`, in place.  Nothing is checked."""
        self.scale_grads_(grads, 1.0 / scale)

    def set(self, value: float) -> None:
        """Another scale from now on.  Raises `ValueError` if FP32 cannot hold or invert it."""
        self._value = invertible(value)
        self.generation += 1

    def state_dict(self) -> dict[str, Any]:
        """apex's format, and that this scale is static."""
        return {"loss_scale": self._value, "unskipped": 0, "dynamic": False}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the scale of a static scaler's `state_dict`.

        What a dynamic scale had reached is not taken: a static scaler does not look for
        overflow.
        """
        entry = checked_entry("loss scaler", state, None)
        loaded = entry["loss_scale"]
        if entry["dynamic"] is False:
            self.set(loaded)
        elif loaded != self._value and not self._is_needed:
            logger.info(
                "The loaded loss scale %g is not needed here: gradients have the range of FP32. "
                "The scale stays %g.",
                loaded,
                self._value,
            )
        elif loaded != self._value:
            logger.warning(
                "The loaded loss scale %g is not of a static scaler; the static scale stays %g. "
                "Use set_loss_scale to change it.",
                loaded,
                self._value,
            )


class DynamicScaler:
    """A loss scale that grows while no gradient overflows and backs off when one does.

    It starts as apex's and torch.amp's do: from 2**16, doubled after 2000 clean steps, halved on
    overflow; and stays within `min_loss_scale` and `max_loss_scale`.

    The scale and the count of clean steps live where the losses do, and nothing here waits for a
    device; `get` and `state_dict` do.
    """

    is_dynamic = True
    is_one = False

    def __init__(self, **settings: Any) -> None:
        self.settings = ScaleSettings(**settings)
        self.generation = 0  # changes with the scale: gradients of another have another scale
        self._numbers = Numbers(
            torch.device("cpu"), self.settings.bounded(self.settings.init_scale)
        )
        self._changed: dict[str, Any] = {}  # settings that are no longer what they began as
        self._flags: list[Flag] = []  # overflow flags of the gradients that `has_overflow` is about
        self._has_reacted = False  # the scale, to these flags
        self.has_reacted_unasked = False  # at a step, where the script was to ask for it

    def scale(self, loss: Tensor) -> tuple[Tensor, Any]:
        """`loss` in FP32 times the scale, and that scale, which no update changes.

        The scaler moves to the device of the loss.  Nothing waits.
        """
        if self._numbers.device != loss.device:
            self._numbers = Numbers(loss.device, *self._numbers.read())
        factor = self.snapshot()
        return (loss if loss.dtype is torch.float32 else loss.float()) * factor, factor

    def snapshot(self) -> Tensor:
        """The present scale, for `scale_grads_` and `unscale_`.  Nothing waits."""
        return self._numbers.snapshot()

    def peek(self) -> Tensor:
        """The tensor that holds the scale, to be read or copied at once."""
        return self._numbers.scale

    def scale_grads_(self, grads: list[Tensor], scale: Any) -> None:
        """Multiply gradients by `scale`, in place."""
        _multiply(grads, scale)

    def unscale_(self, grads: list[Tensor], scale: Any) -> Flag:
        """Divide gradients by `scale`, in place; the flag of an inf or NaN in one of them."""
        if self._has_reacted:
            self._flags, self._has_reacted, self.has_reacted_unasked = [], False, False
        found = self._numbers.unscale_(grads, scale)
        self._flags.append(found)
        return found

    def has_overflow(self) -> bool:
        """Whether gradients have overflowed that were unscaled since the scale last reacted.

        After it has reacted: whether those did.  Waits for the device.
        """
        return any(map(is_set, self._flags))

    def forget_overflow(self) -> None:
        """Have `has_overflow` say no."""
        self._flags, self._has_reacted = [], False

    def update(self, flags: list[Flag]) -> None:
        """React to one step with these flags; without any there was no step."""
        self._has_reacted = True
        if flags:
            self._numbers.update(functools.reduce(either, flags), self.settings)
            self.generation += 1

    def get(self) -> float:
        """The scale.  Waits for the device."""
        return self._numbers.read()[0]

    def set(self, value: float) -> None:
        """Another scale from now on, within the floor and the cap."""
        self._fill(value, None)

    def change(self, what: str, given: Mapping[str, Any]) -> None:
        """Other settings from now on; a new `init_scale` starts the scale anew.

        Raises `TypeError` or `ValueError`, beginning with `what`, and changes nothing.
        """
        self.settings = self.settings.changed(what, given)
        self._changed.update(given)
        if "init_scale" in given:
            self._fill(self.settings.init_scale, 0)
        elif "growth_interval" in given:
            self._fill(*self._numbers.read())
        else:
            self._moved()

    def state_dict(self) -> dict[str, Any]:
        """apex's format, and the settings that were changed on the way.  Waits for the device."""
        scale, clean = self._numbers.read()
        return {"loss_scale": scale, "unskipped": clean, **self._changed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take scale, count and settings of a `state_dict`, apex's too.

        Nothing is taken of a static scaler's state: from the 1.0 of a run without scaling
        this scale would grow for a very long time.
        """
        entry = checked_entry("loss scaler", state, self.settings)
        if entry["dynamic"] is False:
            logger.warning(
                "The loaded loss scale %g is that of a static scaler; this one is dynamic and "
                "stays as it is. It finds its value by itself.",
                entry["loss_scale"],
            )
            return
        rules = {name: entry[name] for name in SETTINGS if name in entry}
        self.settings = self.settings.changed("loss scaler", rules)
        self._changed.update(rules)
        self._fill(entry["loss_scale"], entry["unskipped"])

    def _fill(self, scale: float, clean: int | None) -> None:
        """Set both within limits: from a count beyond the interval torch's kernel never grows."""
        if clean is not None:
            clean = min(clean, self.settings.growth_interval - 1, 2**31 - 1)
        self._numbers.fill(self.settings.bounded(scale), clean)
        self._moved()

    def _moved(self) -> None:
        self._numbers.clamp(self.settings)
        self.generation += 1


Scaler = StaticScaler | DynamicScaler


def make_scaler(loss_scale: str | float, is_needed: bool = True, **limits: Any) -> Scaler:
    """The scaler for `"dynamic"` or a number; `limits` are the fields of `ScaleSettings`."""
    if loss_scale == "dynamic":
        return DynamicScaler(**limits)
    return StaticScaler(float(loss_scale), is_needed)
