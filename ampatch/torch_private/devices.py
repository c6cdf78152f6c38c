"""Which device types there are, and what each of them can do.  To measure: `device_figures.py`.

All questions go through `torch.accelerator`, so that any accelerator of torch works.  Where a
device lacks streams, events, graphs or memory figures, the answer is right without them.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .torch_attributes import torch_attribute

# Every torch has these kernels on CUDA.
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
"""torch's functions that ask for bfloat16, by whether the CPU is an ARM."""

_marks_of_fork = [
    torch_attribute(f"torch.{name}._is_in_bad_fork", lambda: False)
    for name in ("cuda", "xpu", "mps")
]

UNSUPPORTED_ERRORS = (RuntimeError, NotImplementedError, AttributeError)
"""What torch raises where a type of devices lacks a feature."""


def accelerator() -> str | None:
    """The type of the accelerator, as in `tensor.device.type`; None: there is none."""
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
    """The device types that a session casts on before it has models; None: all.

    Without an accelerator no call needs to ask for the device of a tensor.
    """
    return None if accelerator() is None else {"meta"}


# Memory


def can_read_without_sync(device: torch.device) -> bool:
    """Whether the host reads this device's memory without a wait."""
    return device.type == "cpu"


def host_computes_in_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 by instructions of its own.

    Without them torch takes many times as long as in FP32.  What this torch cannot tell is False.
    """
    on_arm = platform.machine().lower() in ("aarch64", "arm64")
    known = torch.ops.mkldnn if on_arm else torch.cpu
    return any(getattr(known, name, bool)() for name in _BFLOAT16[on_arm])


def has_values(device: torch.device) -> bool:
    """Whether tensors there have values at all."""
    return device.type != "meta"


class AsyncCopy:
    """Numbers of a device on their way to the host, which does not wait for them.

    Where a device has no events, or no pinned memory, the host waits once, here.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._event: Any = None
        if can_read_without_sync(numbers.device):
            self._host = numbers.clone()
            return
        try:
            self._host = torch.empty(
                numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True
            )
            self._event = new_event(numbers.device)
        except UNSUPPORTED_ERRORS:
            self._host = numbers.to("cpu")
            return
        self._host.copy_(numbers, non_blocking=True)
        self._event.record(current_stream(numbers.device))

    def value(self) -> list[float] | None:
        """The numbers, once they have arrived."""
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
    """Whether its device is recording work into a graph, so that nothing may wait for it."""
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
    """Whether a copy of a list of tensors is one kernel there, not one for each tensor."""
    return device.type in _types_with_foreach_kernels()


def have_fused_optimizers(tensors: Iterable[Any]) -> bool:
    """Whether torch's fused optimizers, of an accelerator, work on all of these tensors."""
    types = frozenset(_types_with_fused_optimizers()) - {"cpu"}
    params = list(tensors)
    return bool(params) and all(
        isinstance(tensor, Tensor) and tensor.device.type in types and tensor.is_floating_point()
        for tensor in params
    )
