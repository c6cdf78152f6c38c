"""The numbers that rule a dynamic loss scale, and what a checkpoint may hold of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..errors import did_you_mean, type_name

# Within these a scale and its reciprocal are normal FP32 numbers.
SMALLEST, LARGEST = 2.0**-126, 2.0**126


@dataclasses.dataclass(frozen=True)
class ScaleSettings:
    """Start, growth, backoff and limits, with `torch.amp.GradScaler`'s meaning and defaults.

    The limits are drawn into what FP32 can invert.  `changed` checks; the
    constructor trusts.
    """

    init_scale: float = 2.0**16
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_loss_scale: float = 2.0**-24
    max_loss_scale: float = 2.0**24

    def __post_init__(self) -> None:
        for name in ("min_loss_scale", "max_loss_scale"):
            object.__setattr__(self, name, min(max(getattr(self, name), SMALLEST), LARGEST))

    def bounded(self, value: float) -> float:
        """`value` within floor and cap.  Raises `ValueError` unless it is positive and finite."""
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"loss scale {value!r}: expected a positive finite number.")
        return min(max(float(value), self.min_loss_scale), self.max_loss_scale)

    def changed(self, what: str, given: dict[str, Any]) -> ScaleSettings:
        """With `given` in place; raises `TypeError` or `ValueError`, beginning with `what`."""
        names = [field.name for field in dataclasses.fields(self)]
        for name in given:
            if name not in names:
                hint = did_you_mean(name, names) or f" Known are: {', '.join(names)}."
                raise TypeError(f"{what}: {name!r} is no setting of a loss scale.{hint}")
        checked = {
            name: whole_number(f"{what}: {name}={value!r}", value, least=1)
            if name == "growth_interval"
            else positive_number(f"{what}: {name}={value!r}", _bound(name, value))
            for name, value in given.items()
        }
        new = dataclasses.replace(self, **checked)
        if new.growth_factor <= 1.0:
            raise ValueError(f"{what}: growth_factor={new.growth_factor!r}: expected above 1.")
        if new.backoff_factor >= 1.0:
            raise ValueError(f"{what}: backoff_factor={new.backoff_factor!r}: expected below 1.")
        if new.min_loss_scale > new.max_loss_scale:
            raise ValueError(
                f"{what}: min_loss_scale {new.min_loss_scale:g} is above max_loss_scale "
                f"{new.max_loss_scale:g}. Expected min_loss_scale <= max_loss_scale."
            )
        return new


def _bound(name: str, value: Any) -> Any:
    """A limit that came as a string, which `initialize` takes too, as its number."""
    if name in ("min_loss_scale", "max_loss_scale") and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value  # refused as any other string
    return value


SETTINGS = tuple(field.name for field in dataclasses.fields(ScaleSettings))


def positive_number(what: str, value: Any) -> float:
    """A positive finite float.  Raises `TypeError` or `ValueError`, beginning with `what`."""
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{what}: expected a positive number, got {type_name(value)}.")
    number = float(value)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{what}: must be above 0 and finite.")
    return number


def whole_number(what: str, value: Any, *, least: int) -> int:
    """A whole number of at least `least`.  Raises as `positive_number` does."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what}: expected a whole number, got {type_name(value)}.")
    number = int(value)
    if number < least:
        raise ValueError(f"{what}: expected at least {least}.")
    return number


def is_grad_scalers(state: Any) -> bool:
    """Whether this is the `state_dict()` of a `torch.amp.GradScaler` that was enabled."""
    return isinstance(state, dict) and {"scale", "_growth_tracker"} <= state.keys()


def from_grad_scaler(state: dict[str, Any]) -> dict[str, Any]:
    """The entry of one loss scaler from a `torch.amp.GradScaler`'s `state_dict()`."""
    rules = {name: state[name] for name in SETTINGS if name in state}
    return {"loss_scale": state["scale"], "unskipped": state["_growth_tracker"], **rules}


def checked_entry(what: str, entry: Any, settings: ScaleSettings | None) -> dict[str, Any]:
    """One scaler's entry of a `state_dict`, apex's or ours, checked; `settings` are to be changed.

    Raises `TypeError` or `ValueError`, beginning with `what`.
    """
    if not isinstance(entry, dict):
        raise TypeError(f"{what}: expected a dictionary, got {type_name(entry)}.")
    if "loss_scale" not in entry:
        raise ValueError(
            f"{what}: expected 'loss_scale' and 'unskipped', got {sorted(map(str, entry))}."
        )
    rules = {name: entry[name] for name in SETTINGS if name in entry}
    if settings is not None:
        settings.changed(what, rules)
    return {
        **rules,
        "loss_scale": positive_number(
            f"{what}['loss_scale']={entry['loss_scale']!r}", entry["loss_scale"]
        ),
        "unskipped": whole_number(
            f"{what}['unskipped']={entry.get('unskipped')!r}", entry.get("unskipped", 0), least=0
        ),
        "dynamic": entry.get("dynamic"),
    }
