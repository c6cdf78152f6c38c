"""Which device types there are, and which features each has.  `device_figures.py` measures devices.

All queries go through `torch.accelerator`, so that any accelerator of torch works.  If a device
lacks streams, events, graphs or memory statistics, the functions here still return a valid result.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .torch_attributes import torch_attribute

# The fallback is CUDA, which has these kernels in every torch.
_types_with_fused_optimizers = torch_attribute(
    "torch.utils._foreach_utils._get_fused_kernels_supported_devices", lambda: ["cuda"]
)
_types_with_foreach_kernels = torch_attribute(
    "torch.utils._foreach_utils._get_foreach_kernels_supported_devices", lambda: ["cuda"]
)


_BFLOAT16 = {
    False: ("_is_avx512_bf16_supported", "_is_amx_tile_supported"),
    True: ("_is_mkldnn_bf16_supported",),
}
"""torch's functions that return whether the CPU has bfloat16, for an ARM (True) or not."""

_marks_of_fork = [
    torch_attribute(f"torch.{name}._is_in_bad_fork", lambda: False)
    for name in ("cuda", "xpu", "mps")
]

UNSUPPORTED_ERRORS = (RuntimeError, NotImplementedError, AttributeError)
"""The exceptions that torch raises if a device type lacks a feature."""


def accelerator() -> str | None:
    """Return the type of the accelerator, as in `tensor.device.type`, or None if there is none."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def is_lost_by_fork() -> bool:
    """Whether this forked process cannot use a device, because its parent has used it."""
    return any(is_marked() for is_marked in _marks_of_fork)


def device_types() -> tuple[str, ...]:
    """The device types of the tensors that calls may get."""
    device = accelerator()
    return ("cpu",) if device is None else ("cpu", device)


def initial_cast_devices() -> set[str] | None:
    """The device types on which a session casts before it has models; None means all.

    Without an accelerator it is None, so that no call reads the device of a tensor.
    """
    return None if accelerator() is None else {"meta"}


# Memory


def can_read_without_sync(device: torch.device) -> bool:
    """Whether reading a tensor on this device does not synchronize with the device."""
    return device.type == "cpu"


def host_computes_in_bfloat16() -> bool:
    """Whether this CPU has bfloat16 instructions.

    Without them, torch takes many times as long as in FP32.  False if this torch cannot tell.
    """
    on_arm = platform.machine().lower() in ("aarch64", "arm64")
    known = torch.ops.mkldnn if on_arm else torch.cpu
    return any(getattr(known, name, bool)() for name in _BFLOAT16[on_arm])


def has_values(device: torch.device) -> bool:
    """Whether tensors on this device have values.  On "meta" they have none."""
    return device.type != "meta"


class AsyncCopy:
    """An asynchronous copy of a tensor's values to the host.

    If the device has no events, or there is no pinned memory, creating it synchronizes with the
    device.
    """

    def __init__(self, values: Tensor) -> None:
        self._event: Any = None
        if can_read_without_sync(values.device):
            self._host = values.clone()
            return
        try:
            self._host = torch.empty(
                values.shape, dtype=values.dtype, device="cpu", pin_memory=True
            )
            self._event = new_event(values.device)
        except UNSUPPORTED_ERRORS:
            self._host = values.to("cpu")
            return
        self._host.copy_(values, non_blocking=True)
        self._event.record(current_stream(values.device))

    def value(self) -> list[float] | None:
        """Return the values, or None if they have not arrived yet."""
        if self._event is not None and not self._event.query():
            return None
        return self._host.tolist()


# Streams


def device_and_stream(tensor: Tensor) -> Any:
    """The device of a tensor and its current stream; equal for tensors that one kernel may take."""
    device = tensor.device
    if device.type == "cpu" or not _has_streams(device.type):
        return device
    return device, current_stream(device)


def is_stream_capturing(tensor: Tensor) -> bool:
    """Whether the tensor's device captures a graph, during which the host may not synchronize."""
    device = tensor.device
    if device.type == "cpu":
        return False
    if device.type == "cuda":
        return torch.cuda.is_current_stream_capturing()
    if not _has_streams(device.type):
        return False
    is_capturing = getattr(current_stream(device), "is_capturing", None)  # since torch 2.13
    return is_capturing is not None and is_capturing()


@functools.cache
def _has_streams(device: str) -> bool:
    """Whether torch can say which stream of a device type is the current one."""
    if device != accelerator():
        return False
    try:
        current_stream(torch.device(device, 0))
    except UNSUPPORTED_ERRORS:
        return False
    return True


def current_stream(device: torch.device) -> Any:
    return torch.accelerator.current_stream(device)


def new_event(device: torch.device, *, timed: bool = False) -> Any:
    return torch.Event(device=device, enable_timing=timed)


# Kernels


def has_foreach_copy_kernel(device: torch.device) -> bool:
    """Whether a single kernel copies a list of tensors on this device."""
    return device.type in _types_with_foreach_kernels()


def have_fused_optimizers(tensors: Iterable[Any]) -> bool:
    """Whether torch's fused optimizers for accelerators support all of these tensors."""
    types = frozenset(_types_with_fused_optimizers()) - {"cpu"}
    params = list(tensors)
    return bool(params) and all(
        isinstance(tensor, Tensor) and tensor.device.type in types and tensor.is_floating_point()
        for tensor in params
    )
