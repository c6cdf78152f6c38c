"""Operators with an autocast kernel of their own, such as torchvision's `nms` and `roi_align`.

Their authors registered the dtypes in which they compute (`torch.library.register_autocast`, or a
kernel).  No row of an op table could know these operators.  Where calls are cast, such an operator
runs under torch's own autocast, for that call alone and without ampatch's casts, as its authors
expect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.compiler import is_exporting

from ..config.opt_levels import HALF_DTYPES
from ..torch_private.autocast import call_with_torch_autocast, is_torch_autocast_enabled
from ..torch_private.custom_ops import OPERATOR_CLASSES, devices_with_autocast_kernel
from ..torch_private.devices import device_types
from .arguments import tensors_in
from .calls import CastState
from .patches import Patch
from .rules import dtype_and_device


def patches(state: CastState) -> list[Patch]:
    """The patches of the calls of operators and of overloads of operators."""
    return [
        (owner, "__call__", functools.partial(_with_autocast_kernel, state, name_of))
        for owner, name_of in OPERATOR_CLASSES
    ]


def _with_autocast_kernel(
    state: CastState, name_of: Callable[[Any], str], original: Callable
) -> Callable:
    # The device types with an autocast kernel, by operator name; each operator is queried once.
    devices: dict[str, frozenset[str]] = {}

    @functools.wraps(original)
    def __call__(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        name = name_of(self)
        supported = devices.get(name)
        if supported is None:
            supported = devices[name] = devices_with_autocast_kernel(self, name, device_types())
        if not supported or is_exporting():  # an exported graph has the call, not its kernel
            return original(self, *args, **kwargs)
        present = {dtype_and_device(value)[1] for value in tensors_in((*args, *kwargs.values()))}
        for device in sorted(present & supported, key="cpu".__eq__):  # an accelerator first
            dtype = (
                None
                if is_torch_autocast_enabled(device)
                else state.autocast_kernel_dtype(device, args, kwargs)
            )
            if dtype in HALF_DTYPES:
                return state.call_without_casts(
                    call_with_torch_autocast, device, dtype, original, (self, *args), kwargs
                )
        return original(self, *args, **kwargs)

    return __call__
