"""Which kinds of devices there are, and which question each of them answers.

Another kind of device is added here.  `torch.accelerator` is public; a torch without it
(before 2.6) knows CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def accelerator() -> str | None:
    """The type of the accelerator, as in `tensor.device.type`; None: there is none."""
    known = getattr(torch, "accelerator", None)
    if known is None:
        return "cuda" if torch.cuda.is_available() else None
    return known.current_accelerator().type if known.is_available() else None


def device_types() -> tuple[str, ...]:
    """The types of devices whose tensors calls may get."""
    found = accelerator()
    return ("cpu",) if found is None else ("cpu", found)


def devices_to_start_from() -> set[str] | None:
    """The types of devices that a session casts on before it has models; None: all.

    Where there is only one kind of device no call needs to ask.
    """
    return None if accelerator() is None else {"meta"}


def is_read_by_host(tensor: Tensor) -> bool:
    """Whether its values can be looked at without waiting for a device."""
    return tensor.device.type == "cpu"


def place_of(tensor: Tensor) -> Any:
    """Equal for tensors that one kernel may take together: the device and its current stream."""
    if tensor.is_cuda:
        return tensor.device, torch.cuda.current_stream(tensor.device).cuda_stream
    return tensor.device


def is_captured(tensor: Tensor) -> bool:
    """Whether work on its device is being recorded into a CUDA graph: nothing may be waited for."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
