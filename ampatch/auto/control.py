"""Put it all in, and take it out again when the session closes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from ..casting.patches import PatchSet
from ..config.environment import Asked
from ..config.opt_levels import properties_for
from ..log import logger, set_verbosity
from ..session.session import Session, registry
from . import arrays, gradient_hooks, loading, refusals
from .backward import Passes


def why_not(asked: Asked) -> str | None:
    """Why this cannot be had without a line in the script, or None."""
    if asked.opt_level in (None, "O0", "O1", "O4"):
        return None
    return (
        f"--auto with opt level {asked.opt_level}: it converts a model's weights and hooks its "
        "inputs and outputs, and a script without AMP code never says which module is the model, "
        "nor when it is complete. Expected --opt-level O1 (or O0); for "
        f"{asked.opt_level} write two lines into the script: import ampatch, and behind model and "
        "optimizer model, optimizer = ampatch.initialize(model, optimizer)."
    )


def start(asked: Asked) -> Session | None:
    """Begin, in this process, with what is `asked` (by default O1 in float16).

    Returns the session, which ends it when it closes; None at O0 and where
    `AMPATCH_ENABLED` is 0: nothing is changed then.
    """
    if not asked.enabled or asked.opt_level == "O0":
        return None
    set_verbosity(1)
    properties = properties_for(
        asked.opt_level or "O1", asked.dtype or torch.float16, loss_scale=asked.loss_scale
    )
    session = Session(properties)
    session.scales_by_itself = True
    session.open([], [])
    session.cast_on_accelerators()
    patches = PatchSet()
    passes = Passes(session)
    refusals.put(patches)
    loading.put(patches)
    arrays.put(patches, properties.dtype)
    patches.replace(torch.autograd, "backward", passes.around)
    gradient_hooks.put(patches, passes)
    for name in ("__init__", "__setstate__"):  # built, and copied or unpickled
        patches.replace(Optimizer, name, lambda original: _noticing(original, session))
    ending = _Ending(session, patches)
    ending.stop_observing = registry.observe(ending)
    return session


class _Ending:
    """Told by the session when it closes."""

    def __init__(self, session: Session, patches: PatchSet) -> None:
        self._session = session
        self._patches = patches
        self.stop_observing: Callable[[], None]

    def on_close(self, session: Session) -> None:
        """Take the patches out, if it is this session that closes."""
        if session is self._session:
            self._patches.undo()
            self.stop_observing()


def _noticing(original: Callable, session: Session) -> Callable:
    @functools.wraps(original)
    def method(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        if session.is_open and session.managed(optimizer) is None:
            _take_into_care(session, optimizer)

    return method


def _take_into_care(session: Session, optimizer: Any) -> None:
    first = not any(True for _ in session.optimizers())
    managed = session.manage_optimizer(optimizer)
    managed.forget_found_state()
    devices = {parameter.device.type for parameter in managed.parameters()}
    session.cast_on(devices)
    if first:
        registry.refresh()  # torch's gradient tools are ours while there are optimizers
        if "cpu" in devices and session.properties.dtype is torch.float16:
            logger.warning(
                "The model is on the CPU, where float16 products are often many times slower "
                "than float32. For speed pass --dtype bfloat16."
            )
