"""apex.amp.scaler: the loss scale as an object that a script reads, sets and updates."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ampatch import AmpatchError

from ...config.scale_settings import ScaleSettings
from ...session import facade
from .amp_c import multi_tensor_scale

__all__ = ["LossScaler"]

_PICKLED_SETTINGS = ("loss_scale", "unskipped", "scale_seq_len", "min_loss_scale", "max_loss_scale")


def _setting(name: str, default: Any, convert: Callable) -> Any:
    """A property for a setting of a dynamic scaler.  On a static one it is always `default`."""

    def set_value(scaler: LossScaler, value: Any) -> None:
        if scaler.dynamic:
            value = getattr(ScaleSettings, name) if value is None else convert(value)
            scaler._scaler.change_settings("loss scaler", {name: value})

    return property(lambda scaler: getattr(scaler._scaler.settings, name, default), set_value)


class LossScaler:
    """A loss scale under apex's names: its own or, made by `of`, a session's.

    After blocks with `delay_overflow_check=True` a script calls `update_scale()`.  Only that call
    updates the scale, and the next step ignores the overflow of these blocks.  The call reads the
    script's `_overflow_buf` (int, not 0 for an overflow) if the script has set one, else the flags
    of blocks and of `unscale`.  A script may replace `update_scale` too: see `amp.scale_loss`.

    Args:
        loss_scale: a number, or "dynamic".
        init_scale: the first dynamic scale.
        scale_factor, scale_window: a dynamic scale is divided by the factor on overflow, and
            multiplied by it after `scale_window` clean steps in a row.
        min_loss_scale, max_loss_scale: limits of a dynamic scale; `min_loss_scale=None` is 2**-24.

    Pickled it has apex's attributes: checkpoints of `FP16_Optimizer` hold this object.
    """

    has_fused_kernel = True

    def __init__(
        self, loss_scale: float | str, init_scale: float = 2.0**16, scale_factor: float = 2.0,
        scale_window: int = 2000, min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:  # fmt: skip
        rule = {"growth_factor": scale_factor, "backoff_factor": 1 / scale_factor}
        rule |= {"init_scale": init_scale, "max_loss_scale": max_loss_scale}
        if min_loss_scale is not None:
            rule["min_loss_scale"] = min_loss_scale
        self._bind(facade.make_scaler(loss_scale, growth_interval=scale_window, **rule))

    @classmethod
    def of(cls, scaler: facade.Scaler, session: facade.Session) -> LossScaler:
        """The scaler of a session."""
        new = cls.__new__(cls)
        new._bind(scaler, weakref.ref(session))
        return new

    def _bind(self, scaler: Any, session: Callable[[], Any] = lambda: None) -> None:
        self._scaler = scaler
        self._session = session
        self._own_buffer: Tensor | None = None
        self._script_buffer: Tensor | None = None  # set by the script
        self._overflow_flag = False  # set by the script or by `update_scale`
        self._clean_steps = (0, -1)  # the script's `_unskipped`; the scale's generation then

    def __getstate__(self) -> dict[str, Any]:
        factor = getattr(self._scaler.settings, "growth_factor", 2.0)
        saved = {f"_{name}": getattr(self, f"_{name}") for name in _PICKLED_SETTINGS}
        return {**saved, "dynamic": self.dynamic, "scale_factor": factor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        scale, clean, window, *limits = (state[f"_{name}"] for name in _PICKLED_SETTINGS)
        factor = state.get("scale_factor", 2.0)  # apex's pickles have no scale_factor
        loss_scale = "dynamic" if state["dynamic"] else scale
        LossScaler.__init__(self, loss_scale, scale, factor, window, *limits)
        if self.dynamic:
            self._unskipped = clean

    # The scale

    def loss_scale(self) -> float:
        """The scale.  Synchronizes with the device."""
        return self._scaler.get()

    @property
    def _loss_scale(self) -> float:
        return self._scaler.get()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self._scaler.set(float(value))

    @property
    def _unskipped(self) -> int:
        count, generation = self._clean_steps
        if generation == self._scaler.generation:
            return count
        return self._scaler.state_dict()["unskipped"]

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        """`value` may be the growth interval itself, which the scaler's own count never reaches."""
        self._scaler.load_state_dict({"loss_scale": self._scaler.get(), "unskipped": value})
        self._clean_steps = (value, self._scaler.generation)

    @property
    def dynamic(self) -> bool:
        return self._scaler.is_dynamic

    _scale_seq_len = _setting("growth_interval", 2000, int)
    _max_loss_scale = _setting("max_loss_scale", 2.0**24, float)
    _min_loss_scale = _setting("min_loss_scale", None, float)

    @property
    def _has_overflow(self) -> bool:
        return self._overflow_flag or (self._script_buffer is None and self._blocks_overflowed())

    @_has_overflow.setter
    def _has_overflow(self, value: bool) -> None:
        self._overflow_flag = bool(value)
        if not value and self.dynamic:
            self._scaler.forget_overflow()

    @property
    def _overflow_buf(self) -> Tensor:
        if self._script_buffer is not None:
            return self._script_buffer
        if self._own_buffer is None:
            self._own_buffer = torch.zeros(1, dtype=torch.int)
        if self._blocks_overflowed():
            self._own_buffer.fill_(1)
        return self._own_buffer

    @_overflow_buf.setter
    def _overflow_buf(self, value: Tensor) -> None:
        self._script_buffer = None if value is self._own_buffer else value

    def _blocks_overflowed(self) -> bool:
        return self.dynamic and self._scaler.has_overflow()

    def begin_block(self) -> None:
        """Forget earlier overflow at the start of a `scale_loss` block, as apex does."""
        self._overflow_flag = False
        for buffer in (self._own_buffer, self._script_buffer):
            if buffer is not None:
                buffer.zero_()

    def clear_overflow_state(self) -> None:
        """Forget all overflow."""
        self.begin_block()
        self._has_overflow = False

    def update_scale(self) -> bool:
        """Update the scale after one step; returns whether to skip that step.  Synchronizes."""
        if not self.dynamic:
            return False
        self._overflow_flag = self._has_overflow or bool(self._overflow_buf.item())
        if self._scaler.was_updated_by_step:  # the step came before this call
            self._scaler.was_updated_by_step = False
            return self._overflow_flag
        if (session := self._session()) is not None:
            facade.drop_pending_updates(session, self._scaler)
        self._scaler.update([self._overflow_flag])
        return self._overflow_flag

    @property
    def is_update_replaced(self) -> bool:
        """Whether the script has replaced `update_scale`."""
        return getattr(self.update_scale, "__func__", None) is not ORIGINAL_UPDATE_SCALE

    def call_replaced_update_scale(self, optimizers: Sequence[Any]) -> None:
        """Call the script's own `update_scale`, and skip the next step if it returns True."""
        session: Any = self._session()
        facade.drop_pending_updates(session, self._scaler)
        if self.update_scale():
            for managed in session.optimizers:
                if any(managed.optimizer is optimizer for optimizer in optimizers):
                    managed.gradients.keep_flag(True, self._scaler)
        if self.dynamic:
            self._scaler.update([])  # only counts the step: the script has updated the scale

    def unscale(
        self,
        model_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        unused_scale: float = 1.0,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Set `master_grads` to `model_grads` divided by the scale, except after an overflow."""
        scale = self.loss_scale() if scale_override is None else scale_override
        is_done = scale == 1.0 and models_are_masters and not self.dynamic
        if not (is_done or self._has_overflow):
            lists = [list(model_grads), list(master_grads)]
            multi_tensor_scale(0, self._overflow_buf, lists, 1.0 / scale)

    def unscale_with_stashed(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises `AmpatchError`."""
        raise AmpatchError(
            "LossScaler.unscale_with_stashed(...): not available. Keep the earlier gradients in "
            ".grad: amp.scale_loss adds those of its block to them, unscaled."
        )


ORIGINAL_UPDATE_SCALE = LossScaler.update_scale  # which a script may replace
