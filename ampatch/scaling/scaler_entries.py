"""Loads state dicts of loss scalers: ampatch's, apex's and `torch.amp.GradScaler`'s."""

from __future__ import annotations

from typing import Any

from ..config.scale_settings import SCALE_SETTING_NAMES
from ..errors import type_name
from ..log import logger
from .loss_scaler import Scaler, checked_entry


def load_entries(scalers: dict[str, Scaler], state: Any) -> None:
    """Load each scaler's entry of `state`.  Raises the errors of `ampatch.load_state_dict`."""
    if is_grad_scaler_state(state):
        state = dict.fromkeys(scalers, from_grad_scaler(state))
    if not isinstance(state, dict):
        raise TypeError(
            f"ampatch.load_state_dict(state): expected a dictionary, got {type_name(state)}."
        )
    present = [name for name in scalers if name in state]
    unknown = sorted(str(name) for name in state if name not in scalers)
    if not present:
        raise ValueError(
            f"ampatch.load_state_dict(state): state holds {unknown}, expected {list(scalers)}. "
            'Pass a dictionary that state_dict() has returned, such as checkpoint["amp"].'
        )
    for name in present:
        what = f"ampatch.load_state_dict(state): state[{name!r}]"
        checked_entry(what, state[name], scalers[name].settings)
    for name in present:
        scalers[name].load_state_dict(state[name])
    if unknown:
        logger.warning(
            "ampatch.load_state_dict(state): these entries have no loss scaler and are left out: "
            "%s. To load all, call initialize with the num_losses of the saved run.",
            ", ".join(unknown),
        )
    if missing := [f"{name} at {scalers[name].get():g}" for name in scalers if name not in present]:
        logger.warning(
            "ampatch.load_state_dict(state): state has no entries for these loss scalers, which "
            "do not change: %s.",
            ", ".join(missing),
        )


def is_grad_scaler_state(state: Any) -> bool:
    """Whether this is the `state_dict()` of an enabled `torch.amp.GradScaler`."""
    return isinstance(state, dict) and {"scale", "_growth_tracker"} <= state.keys()


def from_grad_scaler(state: dict[str, Any]) -> dict[str, Any]:
    """The entry of one loss scaler from a `torch.amp.GradScaler`'s `state_dict()`."""
    settings = {name: state[name] for name in SCALE_SETTING_NAMES if name in state}
    return {"loss_scale": state["scale"], "unskipped": state["_growth_tracker"], **settings}
