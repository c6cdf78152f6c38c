"""The settings of a dynamic loss scale.  Only this file has their defaults."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ..errors import did_you_mean
from .validation import positive_number, whole_number

# In this range a scale and its reciprocal are normal FP32 numbers.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**126


@dataclasses.dataclass(frozen=True)
class ScaleSettings:
    """Start, growth, backoff and limits, with `torch.amp.GradScaler`'s meaning and defaults.

    The constructor only brings the limits into the range that FP32 can invert.  `with_changes`
    checks all settings.
    """

    init_scale: float = 2.0**16
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_loss_scale: float = 2.0**-24
    max_loss_scale: float = 2.0**24

    def __post_init__(self) -> None:
        for name in ("min_loss_scale", "max_loss_scale"):
            object.__setattr__(
                self, name, min(max(getattr(self, name), SMALLEST_SCALE), LARGEST_SCALE)
            )

    def bounded(self, value: float) -> float:
        """`value`, brought within the limits.  `ValueError` unless it is positive and finite."""
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"loss scale {value!r}: expected a positive finite number.")
        return min(max(float(value), self.min_loss_scale), self.max_loss_scale)

    def with_changes(self, what: str, changes: Mapping[str, Any]) -> ScaleSettings:
        """These settings with those in `changes` changed; numbers may be strings.

        Raises `TypeError` or `ValueError`, beginning with `what`, for an unknown name, a wrong
        value, or settings that contradict each other.
        """
        checked: dict[str, Any] = {}
        for name, value in changes.items():
            what_setting = f"{what}: {name}={value!r}"
            if name not in SCALE_SETTING_NAMES:
                hint = (
                    did_you_mean(name, SCALE_SETTING_NAMES)
                    or f" Known settings: {', '.join(SCALE_SETTING_NAMES)}."
                )
                raise TypeError(f"{what}: {name!r} is not a setting of the loss scale.{hint}")
            if name == "growth_interval":
                checked[name] = whole_number(what_setting, value, least=1)
            else:
                checked[name] = positive_number(what_setting, value, or_text=True)
        new = dataclasses.replace(self, **checked)
        if new.growth_factor <= 1.0:
            raise ValueError(
                f"{what}: growth_factor={new.growth_factor!r}: expected a number above 1."
            )
        if new.backoff_factor >= 1.0:
            raise ValueError(
                f"{what}: backoff_factor={new.backoff_factor!r}: expected a number below 1."
            )
        if new.min_loss_scale > new.max_loss_scale:
            raise ValueError(
                f"{what}: min_loss_scale {new.min_loss_scale:g} is above max_loss_scale "
                f"{new.max_loss_scale:g}. Expected min_loss_scale <= max_loss_scale."
            )
        return new


SCALE_SETTING_NAMES = tuple(field.name for field in dataclasses.fields(ScaleSettings))


def checked_static_scale(value: float) -> float:
    """`value` as a static loss scale.  Raises `ValueError` unless FP32 holds it and its inverse."""
    number = float(value)
    if not SMALLEST_SCALE <= number <= LARGEST_SCALE:
        raise ValueError(
            f"loss_scale={value!r}: expected a number from {SMALLEST_SCALE:g} to "
            f"{LARGEST_SCALE:g} for a static scale, which FP32 can invert."
        )
    return number
