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

import torch
from torch import Tensor

from ..surroundings import is_recording
from .shadows import Shadow, Shadows


_Copy = tuple[Tensor, int, int, Tensor]
"""A weight, held, so that its id stays its own while the copy lives; version, pointer, copy."""


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
        self.held = _Held()
        self.hits = self.misses = 0

    def open(self, opener: object, shadows: Shadows | None = None) -> None:
        """Start a forward of `opener`: nothing is used as an earlier one left it.

        Within another model's forward nothing happens: the outermost counts.
        An opener that finds itself was interrupted (Ctrl-C skips hooks) or calls
        itself; both are safe with an empty cache.
        """
        held = self.held
        if held.is_open and held.opener is not opener:
            return
        held.copies.clear()
        held.opener = opener
        held.is_open = is_open = not is_recording()
        if shadows is not None and is_open and shadows.begin():
            held.shadows, held.shadow_of = shadows, shadows.of
        else:
            held.shadows, held.shadow_of = None, {}

    def close(self, opener: object = None) -> None:
        """End the forward of `opener`, or (None) whatever is open.  Safe to call when closed."""
        held = self.held
        if opener is None or opener is held.opener:
            held.is_open = False
            held.opener = held.shadows = None
            held.shadow_of = {}
            held.copies.clear()

    def info(self) -> CacheInfo:
        """A snapshot of the counts; entries are this thread's."""
        return CacheInfo(self.hits, self.misses, len(self.held.copies))

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`weight` in `dtype`: the copy made earlier in this forward, or a new one."""
        held = self.held
        shadow = held.shadow_of.get(id(weight))
        if (
            shadow is not None
            and shadow.version == weight._version
            and shadow.pointer == weight.data_ptr()
            and shadow.dtype is dtype
            and shadow.wants_grad is weight.requires_grad
        ):
            self.hits += 1
            return shadow.half
        if not held.is_open:
            return weight.to(dtype)
        is_kept = not is_recording()
        if (
            held.shadows is not None
            and id(weight) not in held.shadows.refused
            and dtype is not torch.float32
            and is_kept
        ):
            shadow = held.shadows.add(weight, dtype)
            if shadow is not None:
                self.misses += 1
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
        if copy is not None:
            _, version, pointer, half = copy
            if version == weight._version and pointer == weight.data_ptr():
                self.hits += 1
                return half
        half = weight.to(dtype)
        self.misses += 1
        if is_kept and not weight.is_inference():
            held.copies[key] = (weight, weight._version, weight.data_ptr(), half)
        return half
