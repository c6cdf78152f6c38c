"""Half copies of FP32 weights, each up to date at the start of every outermost forward.

Small weights have leaf half shadows (`shadows.py`), refreshed all at once.  Any
other weight that several calls use within a forward is cast once, and the copy
dropped after it: a `.data` write (an EMA swap) and fused optimizers change weights
without raising `_version`, so what outlives a forward can go stale with no way to
notice.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from .shadows import Shadow, Shadows

try:
    from torch._C._functorch import peek_interpreter_stack
except ImportError:

    def peek_interpreter_stack() -> object:
        """Without a way to ask, assume a transform is running: nothing is kept."""
        return True


class _Copy(NamedTuple):
    weight: Tensor  # held, so that its id stays its own while the copy lives
    version: int
    pointer: int
    half: Tensor


@dataclasses.dataclass
class CacheInfo:
    """Counts since the session opened: `hits`, `misses` (casts made) and `entries` held now."""

    hits: int = 0
    misses: int = 0
    entries: int = 0


class WeightCache:
    """Casts of leaf weights; open only while a managed model's forward runs."""

    def __init__(self) -> None:
        self.is_open = False
        self._opener: object = None
        self._copies: dict[tuple, _Copy] = {}
        self._shadows: Shadows | None = None
        self._of: dict[int, Shadow] = {}
        self._info = CacheInfo()

    def open(self, opener: object, shadows: Shadows | None = None) -> None:
        """Start a forward of `opener`: nothing is used as an earlier one left it.

        Within another model's forward nothing happens: the outermost counts.
        An opener that finds itself was interrupted (Ctrl-C skips hooks) or calls
        itself; both are safe with an empty cache.
        """
        if self.is_open and self._opener is not opener:
            return
        self._copies.clear()
        self._opener = opener
        self.is_open = not _recording()
        self._use(shadows if shadows is not None and self.is_open and shadows.begin() else None)

    def close(self, opener: object = None) -> None:
        """End the forward of `opener`, or (None) whatever is open.  Safe to call when closed."""
        if opener is None or opener is self._opener:
            self.is_open = False
            self._opener = None
            self._use(None)
            self._copies.clear()

    def _use(self, shadows: Shadows | None) -> None:
        self._shadows = shadows
        self._of = {} if shadows is None else shadows.of

    def info(self) -> CacheInfo:
        """A snapshot of the counts."""
        return dataclasses.replace(self._info, entries=len(self._copies))

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`weight` in `dtype`: the copy made earlier in this forward, or a new one."""
        shadow = self._of.get(id(weight))
        if (
            shadow is not None
            and shadow.version == weight._version
            and shadow.pointer == weight.data_ptr()
            and shadow.half.dtype is dtype
        ):
            self._info.hits += 1
            return shadow.half
        if not self.is_open:
            return weight.to(dtype)
        shadows = self._shadows  # another thread may close the cache meanwhile
        if shadows is not None and dtype is not torch.float32 and not _recording():
            shadow = shadows.add(weight, dtype)
            if shadow is not None:
                self._info.misses += 1
                return shadow.half
        # A cast made under no_grad has no graph, one made under inference_mode
        # may not be saved for backward: the mode is part of the key.
        key = (
            id(weight),
            dtype,
            torch.is_grad_enabled() and weight.requires_grad,
            torch.is_inference_mode_enabled(),
        )
        copy = self._copies.get(key)
        if (
            copy is not None
            and copy.version == weight._version
            and copy.pointer == weight.data_ptr()
        ):
            self._info.hits += 1
            return copy.half
        half = weight.to(dtype)
        self._info.misses += 1
        if not weight.is_inference() and not _recording():
            self._copies[key] = _Copy(weight, weight._version, weight.data_ptr(), half)
        return half


def _recording() -> bool:
    """Whether operations are being traced or transformed, so that a kept tensor would leak."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or peek_interpreter_stack() is not None
    )
