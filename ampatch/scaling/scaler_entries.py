"""One loss scaler's entry of a `state_dict`: ampatch's, apex's or `torch.amp.GradScaler`'s."""

from __future__ import annotations

from typing import Any

from ..config.scale_settings import SETTINGS, ScaleSettings
from ..config.validation import positive_number, whole_number
from ..errors import type_name


def is_grad_scalers(state: Any) -> bool:
    """Whether this is the `state_dict()` of a `torch.amp.GradScaler` that was enabled."""
    return isinstance(state, dict) and {"scale", "_growth_tracker"} <= state.keys()


def from_grad_scaler(state: dict[str, Any]) -> dict[str, Any]:
    """The entry of one loss scaler from a `torch.amp.GradScaler`'s `state_dict()`."""
    settings = {name: state[name] for name in SETTINGS if name in state}
    return {"loss_scale": state["scale"], "unskipped": state["_growth_tracker"], **settings}


def checked_entry(what: str, entry: Any, settings: ScaleSettings | None) -> dict[str, Any]:
    """A scaler's entry, checked; `settings` are the scaler's present ones, None if it is static.

    Raises `TypeError` or `ValueError`, beginning with `what`.
    """
    if not isinstance(entry, dict):
        raise TypeError(f"{what}: expected a dictionary, got {type_name(entry)}.")
    if "loss_scale" not in entry:
        raise ValueError(
            f"{what}: expected 'loss_scale' and 'unskipped', got {sorted(map(str, entry))}."
        )
    given = {name: entry[name] for name in SETTINGS if name in entry}
    if settings is not None:
        settings.changed(what, given)
    return {
        **given,
        "loss_scale": positive_number(
            f"{what}['loss_scale']={entry['loss_scale']!r}", entry["loss_scale"]
        ),
        "unskipped": whole_number(
            f"{what}['unskipped']={entry.get('unskipped')!r}", entry.get("unskipped", 0), least=0
        ),
        "dynamic": entry.get("dynamic"),
    }
