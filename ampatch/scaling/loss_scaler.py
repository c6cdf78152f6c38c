"""The loss scale: static, or dynamic.

A static scale is a number; a scale of 1 changes nothing.  A dynamic scale is a 0-dim tensor on the
device of the losses; `scale_value` has the rule of its changes.  Gradients are unscaled by a
snapshot of the scale that multiplied the loss, because another block or `set` may have changed the
scale since then.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..config.scale_settings import SCALE_SETTING_NAMES, ScaleSettings, checked_static_scale
from ..config.validation import positive_number, whole_number
from ..errors import type_name
from ..log import logger
from ..torch_private.devices import can_read_without_sync
from .scale_value import OverflowFlag, combine_flags, is_set, next_scale, update_
from .unscaling import multiply_, unscale_


def checked_entry(what: str, entry: Any, settings: ScaleSettings | None) -> dict[str, Any]:
    """A scaler's entry in a state dict, checked.

    `settings`: the present settings of the scaler, or None if it is static.  Raises `TypeError` or
    `ValueError`, beginning with `what`.
    """
    if not isinstance(entry, dict):
        raise TypeError(f"{what}: expected a dictionary, got {type_name(entry)}.")
    if "loss_scale" not in entry:
        raise ValueError(
            f"{what}: expected 'loss_scale' and 'unskipped', got {sorted(map(str, entry))}."
        )
    saved_settings = {name: entry[name] for name in SCALE_SETTING_NAMES if name in entry}
    if settings is not None:
        settings.with_changes(what, saved_settings)  # raises if a saved setting is wrong
    return {
        **saved_settings,
        "loss_scale": positive_number(
            f"{what}['loss_scale']={entry['loss_scale']!r}", entry["loss_scale"]
        ),
        "unskipped": whole_number(
            f"{what}['unskipped']={entry.get('unskipped')!r}", entry.get("unskipped", 0), least=0
        ),
        "dynamic": entry.get("dynamic"),
    }


class StaticScaler:
    """A fixed loss scale.  It does not check for overflow, so it does not synchronize.

    `is_needed`: gradients may underflow without a scale, as in float16.
    """

    is_dynamic = False
    settings = None

    def __init__(self, value: float = 1.0, is_needed: bool = True) -> None:
        self._value = checked_static_scale(value)
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
        """The scale."""
        return self._value

    snapshot = peek = get

    def scale_grads_(self, grads: list[Tensor], scale: float) -> None:
        """Multiply gradients by `scale`, in place."""
        if scale != 1.0:
            multiply_(grads, scale)

    def unscale_(self, grads: list[Tensor], scale: float) -> None:
        """Divide gradients by `scale`, in place, without a check for overflow."""
        self.scale_grads_(grads, 1.0 / scale)

    def set(self, value: float) -> None:
        """Set the scale.  Raises `ValueError` if FP32 cannot hold or invert it."""
        self._value = checked_static_scale(value)
        self.generation += 1

    def state_dict(self) -> dict[str, Any]:
        """The state in apex's format, plus `"dynamic": False`."""
        return {"loss_scale": self._value, "unskipped": 0, "dynamic": False}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the scale from a static scaler's `state_dict`.

        The value of a dynamic scale is not loaded: a static scaler does not check for overflow.
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
                "The loaded loss scale %g comes from a dynamic scaler; the static scale stays %g. "
                "Use set_loss_scale to change it.",
                loaded,
                self._value,
            )


class DynamicScaler:
    """A loss scale that grows while no gradient overflows and backs off when one does.

    The defaults are those of apex and torch.amp: the scale starts at 2**16, is doubled after 2000
    clean steps, and is halved on overflow.  It stays within `min_loss_scale` and `max_loss_scale`.

    The scale (FP32) and the growth tracker (int32: clean steps) are 0-dim tensors on the device of
    the losses.  Updates write into these tensors, because CUDA graphs may hold them.  Only `get`,
    `has_overflow`, `state_dict`, a new `growth_interval` and a move to another device synchronize.
    """

    is_dynamic = True
    is_one = False

    def __init__(self, **settings: Any) -> None:
        self.settings = ScaleSettings(**settings)
        self.generation = 0  # raised by each call that may change the scale
        self._make_tensors(torch.device("cpu"), self.settings.bounded(self.settings.init_scale), 0)
        self._changed_settings: dict[str, Any] = {}  # since the constructor
        self._flags: list[OverflowFlag] = []  # for `has_overflow`
        self._has_updated = False  # `update` was called since the last `unscale_`
        # A step has run the update that `delay_overflow_check` postponed, so the script's own
        # `update_scale` is late.
        self.was_updated_by_step = False

    def _make_tensors(self, device: torch.device, scale: float, tracker: int) -> None:
        self._device = device
        self._is_on_host = can_read_without_sync(device)
        self._scale = torch.tensor(scale, dtype=torch.float32, device=device)
        self._growth_tracker = torch.tensor(tracker, dtype=torch.int32, device=device)

    def _read_tensors(self) -> tuple[float, int]:
        """The scale and the growth tracker.  Synchronizes with the device."""
        return self._scale.item(), int(self._growth_tracker.item())

    def scale(self, loss: Tensor) -> tuple[Tensor, Any]:
        """`loss` in FP32 times the scale, and a copy of that scale.

        The scaler moves to the device of the loss; a move synchronizes.
        """
        if self._device != loss.device:
            self._make_tensors(loss.device, *self._read_tensors())
        factor = self._scale.clone()
        return (loss if loss.dtype is torch.float32 else loss.float()) * factor, factor

    def snapshot(self) -> Tensor:
        """A copy of the scale, for `scale_grads_` and `unscale_`.  Does not synchronize."""
        return self._scale.clone()

    def peek(self) -> Tensor:
        """The scaler's own tensor of the scale, which the next update changes."""
        return self._scale

    def scale_grads_(self, grads: list[Tensor], scale: Any) -> None:
        """Multiply gradients by `scale`, in place."""
        multiply_(grads, scale)

    def unscale_(self, grads: list[Tensor], scale: Any) -> OverflowFlag:
        """Divide gradients by `scale`, in place; returns whether they had an inf or NaN."""
        if self._has_updated:
            self._flags = []
            self._has_updated = False
            self.was_updated_by_step = False
        found_inf = unscale_(grads, scale, as_bool=self._is_on_host)
        self._flags.append(found_inf)
        return found_inf

    def has_overflow(self) -> bool:
        """Whether gradients that were unscaled since the last `update` have overflowed.

        Right after an `update`, the result covers the gradients that were unscaled before this
        update.  Synchronizes with the device.
        """
        return any(map(is_set, self._flags))

    def forget_overflow(self) -> None:
        """Make `has_overflow` False until the next `unscale_`."""
        self._flags = []
        self._has_updated = False

    def update(self, flags: list[OverflowFlag]) -> None:
        """Update the scale for one step with these overflow flags; an empty list counts no step."""
        self._has_updated = True
        if not flags:
            return
        found_inf = functools.reduce(combine_flags, flags)
        if self._is_on_host:  # arithmetic on numbers is faster than operators
            before = self._scale.tolist()
            tracker = self._growth_tracker.tolist()
            scale, tracker = next_scale(before, tracker, is_set(found_inf), self.settings)
            self._growth_tracker.fill_(tracker)
            if scale != before:
                self._scale.fill_(scale)
                self._clamp_scale()
        else:
            update_(self._scale, self._growth_tracker, found_inf, self.settings)
            self._clamp_scale()
        self.generation += 1

    def get(self) -> float:
        """The scale.  Synchronizes with the device."""
        return self._scale.item()

    def set(self, value: float) -> None:
        """Set the scale, within `min_loss_scale` and `max_loss_scale`."""
        self._fill_tensors(value, None)

    def change_settings(self, what: str, changes: Mapping[str, Any]) -> None:
        """Change settings; a new `init_scale` also resets the scale.

        Raises `TypeError` or `ValueError`, beginning with `what`, and changes nothing.
        """
        self.settings = self.settings.with_changes(what, changes)
        self._changed_settings.update(changes)
        if "init_scale" in changes:
            self._fill_tensors(self.settings.init_scale, 0)
        elif "growth_interval" in changes:
            self._fill_tensors(*self._read_tensors())
        else:
            self._clamp_scale()
            self.generation += 1

    def state_dict(self) -> dict[str, Any]:
        """The state in apex's format, and changed settings.  Synchronizes with the device."""
        scale, tracker = self._read_tensors()
        return {"loss_scale": scale, "unskipped": tracker, **self._changed_settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load scale, growth tracker and settings from a `state_dict`, also from apex's.

        The state of a static scaler is not loaded: from 1.0, the scale of a run without scaling, a
        dynamic scale would take very long to grow.
        """
        entry = checked_entry("loss scaler", state, self.settings)
        if entry["dynamic"] is False:
            logger.warning(
                "The loaded loss scale %g comes from a static scaler; this dynamic scaler keeps "
                "its scale, which it adjusts itself.",
                entry["loss_scale"],
            )
            return
        loaded = {name: entry[name] for name in SCALE_SETTING_NAMES if name in entry}
        self.settings = self.settings.with_changes("loss scaler", loaded)
        self._changed_settings.update(loaded)
        self._fill_tensors(entry["loss_scale"], entry["unskipped"])

    def _fill_tensors(self, scale: float, tracker: int | None) -> None:
        """Set the scale and the growth tracker, within their limits."""
        self._scale.fill_(self.settings.bounded(scale))
        if tracker is not None:
            # torch's kernel never grows the scale from a tracker of `growth_interval` or above.
            self._growth_tracker.fill_(min(tracker, self.settings.growth_interval - 1, 2**31 - 1))
        self._clamp_scale()
        self.generation += 1

    def _clamp_scale(self) -> None:
        """Bring the scale within `min_loss_scale` and `max_loss_scale`."""
        self._scale.clamp_(self.settings.min_loss_scale, self.settings.max_loss_scale)


Scaler = StaticScaler | DynamicScaler


def make_scaler(loss_scale: str | float, is_needed: bool = True, **settings: Any) -> Scaler:
    """The scaler for `"dynamic"` or a number; `settings` are the fields of `ScaleSettings`."""
    if loss_scale == "dynamic":
        return DynamicScaler(**settings)
    return StaticScaler(float(loss_scale), is_needed)
