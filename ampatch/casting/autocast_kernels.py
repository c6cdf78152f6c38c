"""Operators that bring a kernel for autocast, such as torchvision's `nms` and `roi_align`.

Their authors have written down which dtypes they compute in (`torch.library.register_autocast`,
or a kernel of their own).  Where calls are cast such an operator runs inside torch's own autocast,
for that call alone and without casts of ampatch, as its authors expect it.  No row of a table could
know them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.compiler import is_exporting

from ..config.opt_levels import HALF_TYPES
from ..torch_private.autocast import call_with, is_enabled
from ..torch_private.custom_ops import CALLED, autocast_devices
from ..torch_private.devices import device_types
from .arguments import tensors_in
from .calls import CastState
from .patches import Replacement
from .rules import kind_of


def replacements(state: CastState) -> list[Replacement]:
    """What to replace: the call of an operator, and that of one of its overloads."""
    return [
        (owner, "__call__", functools.partial(_calling, state, name_of))
        for owner, name_of in CALLED
    ]


def _calling(state: CastState, name_of: Callable[[Any], str], original: Callable) -> Callable:
    devices: dict[str, frozenset[str]] = {}  # those with a kernel for autocast: asked once

    @functools.wraps(original)
    def __call__(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        name = name_of(self)
        found = devices.get(name)
        if found is None:
            found = devices[name] = autocast_devices(self, name, device_types())
        if not found or is_exporting():  # it records the call, not the kernel for autocast
            return original(self, *args, **kwargs)
        kinds = {kind_of(value)[1] for value in tensors_in((*args, *kwargs.values()))} & found
        for kind in sorted(kinds, key="cpu".__eq__):  # an accelerator before the host
            half = None if is_enabled(kind) else state.half_dtype_of(kind, args, kwargs)
            if half in HALF_TYPES:
                return state.casts_off(call_with, kind, half, original, (self, *args), kwargs)
        return original(self, *args, **kwargs)

    return __call__
