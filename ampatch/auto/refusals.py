"""Refuses scripts that have AMP code of their own.

apex's `initialize` and `init` are refused too, because they call ampatch's.  torch's
`GradScaler` and `autocast` are accepted while they are switched off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.amp.autocast_mode import autocast

import ampatch

from ..errors import AmpatchError
from ..session.facade import PatchSet


def install(patches: PatchSet) -> None:
    """Replace the entry points of AMP code by functions that raise."""
    for name in ("initialize", "init"):
        patches.replace(ampatch, name, functools.partial(_refuse_call, f"ampatch.{name}"))
    patches.replace(torch.amp.GradScaler, "__init__", _refuse_scaler)
    patches.replace(autocast, "__enter__", _refuse_autocast)


def _error(call: str, instead: str) -> AmpatchError:
    return AmpatchError(
        f"--auto is for scripts without AMP code, and this one calls {call}. {instead}"
    )


def _refuse_call(call: str, original: Callable) -> Callable:
    """A function that raises, also for `enabled=False`: `scale_loss` would use --auto's session."""

    @functools.wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise _error(
            call, "Leave out --auto; --opt-level, --dtype and --loss-scale count there too."
        )

    return refuse


_INSTEAD_OF_TORCH = (
    "Run it with plain Python, or remove these lines. Regions of torch.autocast with enabled=False "
    "may stay: they run in FP32 under --auto too."
)


def _refuse_scaler(original: Callable) -> Callable:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.is_enabled():
            raise _error("torch.amp.GradScaler", _INSTEAD_OF_TORCH)

    return __init__


def _refuse_autocast(original: Callable) -> Callable:
    @functools.wraps(original)
    def __enter__(self: Any) -> Any:
        if self._enabled:
            raise _error("torch.autocast", _INSTEAD_OF_TORCH)
        return original(self)

    return __enter__
