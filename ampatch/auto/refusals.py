"""Scripts that have AMP code of their own are told so, before two engines meet in them.

apex's `initialize` and `init` come here too: ampatch's stand behind them.  torch's are let
through where they are switched off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.amp.autocast_mode import autocast

import ampatch

from ..casting.patches import PatchSet
from ..errors import AmpatchError


def put(patches: PatchSet) -> None:
    """Have the ways into other AMP code refuse."""
    for name in ("initialize", "init"):
        patches.replace(ampatch, name, functools.partial(_refusing, f"ampatch.{name}"))
    patches.replace(torch.amp.GradScaler, "__init__", _refusing_scaler)
    patches.replace(autocast, "__enter__", _refusing_autocast)


def _error(what: str, instead: str) -> AmpatchError:
    return AmpatchError(
        f"ampatch run --auto is for scripts without AMP code, and this one calls {what}. {instead}"
    )


def _refusing(what: str, original: Callable) -> Callable:
    """Refuses with `enabled=False` too: the script's `scale_loss` would find our session."""

    @functools.wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise _error(
            what, "Leave out --auto; --opt-level, --dtype and --loss-scale count there too."
        )

    return refuse


_TORCHS = "Run it with Python as it is, switch its AMP off, or take these lines out of it."


def _refusing_scaler(original: Callable) -> Callable:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.is_enabled():
            raise _error("torch.amp.GradScaler", _TORCHS)

    return __init__


def _refusing_autocast(original: Callable) -> Callable:
    @functools.wraps(original)
    def __enter__(self: Any) -> Any:
        if self._enabled:
            raise _error("torch.autocast", _TORCHS)
        return original(self)

    return __enter__
