"""apex.amp: apex's functions with apex's signatures, over ampatch's.

At O1, sessions opened from here follow apex's tables where these differ from autocast's policy:
`binary_cross_entropy` and in-place functions that overflow are refused on half tensors,
`Tensor.cpu()` returns FP32, and so on.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import types
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

import ampatch
from ampatch import (
    disable_casts,
    float_function,
    half_function,
    master_params,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)

from ...session import facade
from ...types import AnyOptimizer, Models, Optimizers, OptLevel
from . import lists
from .scaler import LossScaler
from .state import Stash, _amp_state, scaler_in_use, scaling_sessions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ...api.legacy_init import Handle
    from ...types import ApexSettings

__all__ = [
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]


@overload
def initialize(
    models: Models, optimizers: None = None, enabled: bool = True, opt_level: OptLevel = "O1", *,
    num_losses: int = 1, **settings: Unpack[ApexSettings],
) -> Models: ...  # fmt: skip


@overload
def initialize(
    models: Models, optimizers: Optimizers, enabled: bool = True, opt_level: OptLevel = "O1", *,
    num_losses: int = 1, **settings: Unpack[ApexSettings],
) -> tuple[Models, Optimizers]: ...  # fmt: skip


_INITIALIZE = inspect.signature(ampatch.initialize)
_INITIALIZE = _INITIALIZE.replace(  # apex's arguments are those that may be positional
    parameters=[p for p in _INITIALIZE.parameters.values() if p.kind is not p.KEYWORD_ONLY]
)


def initialize(*args: Any, **settings: Any) -> Any:
    """`ampatch.initialize` with apex's signature and tables.

    It also behaves like apex at O1 and with several optimizers (`docs/from_apex.md`).
    Optimizers get `_amp_stash` and `_lazy_init_maybe_master_weights`, which scripts use,
    until their session closes.
    """
    try:
        call = _INITIALIZE.bind(*args, **settings)
    except TypeError as error:
        raise TypeError(f"amp.initialize(...): {error}.") from None
    facade.edit_tables(lists.edits())
    with facade.with_apex_tables():
        options = {"allow_banned": False, "patch_scope": "process"}
        result = ampatch.initialize(*call.args, **call.kwargs, **options)
    session = facade.open_sessions()[-1]
    _amp_state.verbosity = call.arguments.get("verbosity", 1)
    if session.properties.enabled:
        for managed in session.optimizers:
            _attach_stash(managed.optimizer)
    return result


initialize.__signature__ = _INITIALIZE  # type: ignore[attr-defined]


@functools.wraps(ampatch.init)
def init(*args: Any, **kwargs: Any) -> Handle:
    """Apply the edits of `amp.lists`, then call `ampatch.init`."""
    facade.edit_tables(lists.edits())
    return ampatch.init(*args, **kwargs)


def scale_loss(
    loss: Tensor, optimizers: AnyOptimizer | Sequence[AnyOptimizer], loss_id: int = 0,
    model: object = None, delay_unscale: bool = False, delay_overflow_check: bool = False,
) -> AbstractContextManager[Tensor]:  # fmt: skip
    """`ampatch.scale_loss`.

    At O2 the first block after a step begins without gradients: see `Stash.begin_block`.  If a
    script has replaced the scaler's `update_scale`, the block calls the replacement as it ends, as
    apex does: then only the replacement updates the scale, and it returns whether to skip a step.
    """
    listed = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    scaler = scaler_in_use(facade.session_of(listed[0]) if listed else None, loss_id)
    calls_replacement = scaler is not None and scaler.is_update_replaced and not delay_unscale
    block = ampatch.scale_loss(
        *(loss, optimizers, loss_id, model, delay_unscale),
        delay_overflow_check=delay_overflow_check or calls_replacement,
    )
    for stash in [o._amp_stash for o in listed if hasattr(o, "_amp_stash")]:
        stash.begin_block()
    if scaler is None:
        return block
    scaler.begin_block()
    return (
        _then_update(block, scaler, listed)
        if calls_replacement and not delay_overflow_check
        else block
    )


@contextlib.contextmanager
def _then_update(block: Any, scaler: LossScaler, optimizers: Sequence[Any]) -> Iterator[Tensor]:
    with block as scaled:
        yield scaled
    scaler.call_replaced_update_scale(optimizers)


def state_dict() -> dict[str, dict[str, Any]]:
    """The loss scalers of `_amp_state.loss_scalers`, as `ampatch.state_dict` of one session."""
    return {name: scaler.state_dict() for name, (scaler, _) in _scalers().items()}


def load_state_dict(state: dict[str, Any]) -> None:
    """Like `ampatch.load_state_dict`, for the scalers of `state_dict`.

    In apex the scalers of one `initialize` serve all optimizers.  So a scaler that the checkpoint
    has no entry for takes the entry of the scaler's index in its session.
    """
    scalers = _scalers()
    if isinstance(state, dict):
        saved = state
        for name, (_, name_in_session) in scalers.items():
            if name not in saved and name_in_session in saved:
                state = state | {name: saved[name_in_session]}
    facade.load_entries({name: scaler for name, (scaler, _) in scalers.items()}, state)


def _scalers() -> dict[str, tuple[facade.Scaler, str]]:
    """Maps the name of each scaler in use to the scaler and its name within its session."""
    if len(facade.open_sessions()) > 1:
        gc.collect()  # optimizers of earlier cross-validation runs are in reference cycles
    sessions = scaling_sessions()
    if not sessions:
        ampatch.state_dict()  # raises `AmpatchError`: no session is open
    pairs = [
        (scaler, f"loss_scaler{n}")
        for session in sessions
        for n, scaler in enumerate(session.scalers)
    ]
    return {f"loss_scaler{n}": pair for n, pair in enumerate(pairs)}


_OPTIMIZER_ATTRIBUTES = ("_amp_stash", "_lazy_init_maybe_master_weights")


def _attach_stash(optimizer: Any) -> None:
    optimizer._amp_stash = Stash(optimizer)
    optimizer._lazy_init_maybe_master_weights = types.MethodType(_lazy_init, optimizer)


def _lazy_init(optimizer: Any) -> None:
    """Only set apex's flag: apex made master weights here, ampatch's weights are FP32 already."""
    optimizer._amp_stash.lazy_init_called = True


class StashObserver:
    """Records steps in the stash; removes apex's attributes from the optimizers at the end."""

    def on_step(self, optimizer: Any, skipped: object) -> None:
        """Called after each step, also a skipped one."""
        if (stash := vars(optimizer).get("_amp_stash")) is not None:
            stash.has_stepped = True

    def on_close(self, session: facade.Session) -> None:
        """Called when a session closes, before its optimizers are released."""
        for managed in session.optimizers:
            for name in _OPTIMIZER_ATTRIBUTES:
                vars(managed.optimizer).pop(name, None)
