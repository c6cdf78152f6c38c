"""Starts `--auto` in this process, and undoes its patches when its session closes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import ampatch

from ..config.opt_levels import properties_for, warn_of_slow_float16
from ..log import set_verbosity
from ..session import facade
from ..session.facade import PatchSet, Session
from . import arrays, gradient_hooks, refusals
from .backward import BackwardPasses

_SUPPORTED_SETTINGS = (
    "--auto takes O0, O1 or O4, without overrides, because a script without AMP code never says "
    "which module is the model. For other settings, import ampatch, and after you make model and "
    "optimizer, add: model, optimizer = ampatch.initialize(model, optimizer)"
)


def check(settings: dict[str, Any]) -> None:
    """Raise `ValueError` for an opt level or overrides that `--auto` cannot have."""
    level = settings.get("opt_level", "O1")
    if "overrides" in settings:
        raise ValueError(
            "--auto with overrides (--overrides, AMPATCH_OVERRIDES): they name modules by their "
            f"paths in the model. {_SUPPORTED_SETTINGS}"
        )
    if level not in ("O0", "O1", "O4"):
        raise ValueError(
            f"--auto with opt level {level}: this level casts the model's weights, inputs "
            f"and outputs. {_SUPPORTED_SETTINGS}"
        )


def start(settings: dict[str, Any]) -> Session | None:
    """Start mixed precision in this process with these settings (default: O1, float16).

    Returns the session; closing it ends mixed precision.  At O0, or if `AMPATCH_ENABLED` is 0,
    returns None and changes nothing.
    """
    level, half = settings.get("opt_level", "O1"), settings.get("dtype", torch.float16)
    if not settings.get("enabled", True) or level == "O0":
        return None
    set_verbosity(1)
    properties = properties_for(
        level, half, loss_scale=settings.get("loss_scale"), patch_scope="model"
    )
    session, forwards = facade.open_automatic_session(properties)
    patches = PatchSet()
    passes = BackwardPasses(session, forwards)
    patches.replace(nn.Module, "__call__", forwards.around)
    patches.replace(torch.autograd, "grad", passes.wrap_grad)
    refusals.install(patches)
    arrays.install(patches, properties.dtype)
    patches.replace(torch.autograd, "backward", passes.wrap_backward)
    if not session.scalers[0].is_one:
        gradient_hooks.install(patches, passes)
    for name in ("__init__", "__setstate__"):  # new optimizers, and copied or unpickled ones
        patches.replace(Optimizer, name, lambda original: _manage_after(original, session))
    remover = _PatchRemover(session, patches)
    remover.stop_observing = ampatch.observe(remover)
    return session


class _PatchRemover:
    """Observer that undoes the patches when the session closes."""

    def __init__(self, session: Session, patches: PatchSet) -> None:
        self._session = session
        self._patches = patches
        self.stop_observing: Callable[[], None]  # set by `start`

    def on_close(self, session: Session) -> None:
        """Undo the patches if the closing session is the one of `--auto`."""
        if session is self._session:
            self._patches.undo()
            self.stop_observing()


def _manage_after(original: Callable, session: Session) -> Callable:
    """Wrap a method of optimizers, so that the session manages the optimizer after the call."""

    @functools.wraps(original)
    def method(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        if session.is_open and facade.session_of(optimizer) is None:
            _manage(session, optimizer)

    return method


def _manage(session: Session, optimizer: Any) -> None:
    managed = facade.manage_optimizer(session, optimizer)
    warn_of_slow_float16(session.properties, managed.parameters())
