"""Half copies of FP32 weights, each up to date at the start of every outermost forward.

Small weights have leaf half shadows (`shadows.py`), refreshed all at once.  Any
other weight that several calls use within a forward is cast once, and the copy
dropped after it: a `.data` write (an EMA swap) and fused optimizers change weights
without raising `_version`, so what outlives a forward can go stale with no way to
notice.  Each thread has copies of its own: another thread's forward may begin and
end at any moment.
"""

from __future__ import annotations

import dataclasses
import threading
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


class _Held(threading.local):
    def __init__(self) -> None:
        self.is_open = False
        self.opener: object = None
        self.copies: dict[tuple, _Copy] = {}
        self.shadows: Shadows | None = None  # of the model whose forward is open
        self.shadow_of: dict[int, Shadow] = {}


class WeightCache:
    """Casts of leaf weights; open only while a managed model's forward runs, in its thread."""

    def __init__(self) -> None:
        self._held = _Held()
        self._info = CacheInfo()

    def open(self, opener: object, shadows: Shadows | None = None) -> None:
        """Start a forward of `opener`: nothing is used as an earlier one left it.

        Within another model's forward nothing happens: the outermost counts.
        An opener that finds itself was interrupted (Ctrl-C skips hooks) or calls
        itself; both are safe with an empty cache.
        """
        held = self._held
        if held.is_open and held.opener is not opener:
            return
        held.copies.clear()
        held.opener = opener
        held.is_open = not _recording()
        usable = shadows is not None and held.is_open and shadows.begin()
        held.shadows = shadows if usable else None
        held.shadow_of = shadows.of if usable else {}

    def close(self, opener: object = None) -> None:
        """End the forward of `opener`, or (None) whatever is open.  Safe to call when closed."""
        held = self._held
        if opener is None or opener is held.opener:
            held.is_open = False
            held.opener = held.shadows = None
            held.shadow_of = {}
            held.copies.clear()

    def info(self) -> CacheInfo:
        """A snapshot of the counts; entries are this thread's."""
        return dataclasses.replace(self._info, entries=len(self._held.copies))

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`weight` in `dtype`: the copy made earlier in this forward, or a new one."""
        held = self._held
        shadow = held.shadow_of.get(id(weight))
        if (
            shadow is not None
            and shadow.version == weight._version
            and shadow.pointer == weight.data_ptr()
            and shadow.half.dtype is dtype
        ):
            self._info.hits += 1
            return shadow.half
        if not held.is_open:
            return weight.to(dtype)
        if held.shadows is not None and dtype is not torch.float32 and not _recording():
            shadow = held.shadows.add(weight, dtype)
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
        copy = held.copies.get(key)
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
            held.copies[key] = _Copy(weight, weight._version, weight.data_ptr(), half)
        return half


def _recording() -> bool:
    """Whether operations are being traced or transformed, so that a kept tensor would leak."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or peek_interpreter_stack() is not None
    )
