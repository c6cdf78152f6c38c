"""Whether the dynamic loss scale absorbs a non-finite gradient.

It does if the scale can come down (it is dynamic, and above both 1 and its own floor), and if
the number that overflowed is one that a dtype can hold at the lowest of these scales.
Gradients are proportional to the scale: what is `exact` at one is known at each.
"""

from __future__ import annotations

from typing import Any

import torch

from .operators import Origin


class LossScale:
    """The scaler of the `scale_loss` block that runs, asked about what overflows in it."""

    def __init__(self) -> None:
        self._scaler: Any = None

    def enter(self, scaler: Any) -> None:
        """A block begins."""
        self._scaler = scaler

    def leave(self) -> None:
        """It has ended."""
        self._scaler = None

    @property
    def value(self) -> float | None:
        """The scale in force; None outside of a block.  Waits for the device."""
        return None if self._scaler is None else self._scaler.get()

    def at_1(self, origin: Origin) -> float | None:
        """What the operator gives at scale 1, where that is known."""
        scale = self.value
        return None if scale is None or origin.exact is None else origin.exact / scale

    def absorbs(self, origin: Origin) -> bool:
        """Whether a smaller scale, of 1 or more, makes finite what began at `origin`.

        True also where that could not be computed: it shows when the scale has come down to 1.
        """
        scaler = self._scaler
        if origin.phase != "backward" or scaler is None or not scaler.is_dynamic:
            return False
        scale, lowest = scaler.get(), max(1.0, scaler.settings.min_loss_scale)
        if scale <= lowest:
            return False
        if origin.exact is None:
            return True
        return origin.exact * lowest / scale <= torch.finfo(origin.dtype).max
