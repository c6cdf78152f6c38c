"""Which kinds of devices there are, and what each of them can do: the one module that knows.

Everything is asked through `torch.accelerator`, so that any accelerator that torch knows is
served.  A torch without it (before 2.6) knows CUDA.  Where a device lacks streams, events or
graphs, the answer is the one that is right without them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

try:
    from torch import accelerator as _accelerator
except ImportError:
    _accelerator = None  # type: ignore[assignment]

try:
    from torch._C import _get_privateuse1_backend_name as _name_of_private_backend
except ImportError:

    def _name_of_private_backend() -> str:
        """The name that torch gives such a backend before it is renamed."""
        return "privateuseone"


try:
    from torch.utils._foreach_utils import (
        _get_fused_kernels_supported_devices as _types_with_fused_optimizers,
    )
except ImportError:

    def _types_with_fused_optimizers() -> list[str]:
        """Where every torch has them."""
        return ["cuda"]


try:
    from torch.utils._foreach_utils import (
        _get_foreach_kernels_supported_devices as _types_with_list_kernels,
    )
except ImportError:

    def _types_with_list_kernels() -> list[str]:
        """Where every torch has them."""
        return ["cuda"]


FUSED_ATTENTION = frozenset(("cpu", "cuda"))
"""The types of devices where torch's fused attention and encoder layers take half."""


def accelerator() -> str | None:
    """The type of the accelerator, as in `tensor.device.type`; None: there is none."""
    if _accelerator is None:
        return "cuda" if torch.cuda.is_available() else None
    if not _accelerator.is_available():
        return None
    found = _accelerator.current_accelerator()
    return None if found is None else found.type


def device_types() -> tuple[str, ...]:
    """The types of devices whose tensors calls may get."""
    found = accelerator()
    return ("cpu",) if found is None else ("cpu", found)


def devices_to_start_from() -> set[str] | None:
    """The types of devices that a session casts on before it has models; None: all.

    Where there is only one kind of device no call needs to ask.
    """
    return None if accelerator() is None else {"meta"}


def autocast_keys() -> dict[str, str]:
    """The types of devices by torch's names of their dispatch keys for autocast."""
    return {
        "AutocastCPU": "cpu",
        "AutocastCUDA": "cuda",
        "AutocastHPU": "hpu",
        "AutocastIPU": "ipu",
        "AutocastMAIA": "maia",
        "AutocastMPS": "mps",
        "AutocastMTIA": "mtia",
        "AutocastXLA": "xla",
        "AutocastXPU": "xpu",
        "AutocastPrivateUse1": _name_of_private_backend(),
    }


# Memory


def is_owned_by_host(device: torch.device) -> bool:
    """Whether the host reads this device's memory without a wait."""
    return device.type == "cpu"


def is_read_by_host(tensor: Tensor) -> bool:
    """Whether its values can be looked at without waiting for a device."""
    return tensor.device.type == "cpu"


def has_values(device: torch.device) -> bool:
    """Whether tensors there have values at all."""
    return device.type != "meta"


class LateCopy:
    """Numbers of a device on their way to the host, which does not wait for them.

    Where a device has no events, or no pinned memory, the host waits once, here.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._event: Any = None
        try:
            self._host = torch.empty(
                numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True
            )
            self._event = _new_event(numbers.device)
        except (RuntimeError, NotImplementedError):
            self._host = numbers.to("cpu")
            return
        self._host.copy_(numbers, non_blocking=True)
        self._event.record(_current_stream(numbers.device))

    def value(self) -> list[float] | None:
        """The numbers, once they have arrived."""
        if self._event is not None and not self._event.query():
            return None
        return self._host.tolist()


# Streams


def place_of(tensor: Tensor) -> Any:
    """Equal for tensors that one kernel may take together: the device and its current stream."""
    device = tensor.device
    if device.type == "cpu" or not _has_streams(device.type):
        return device
    return device, _current_stream(device)


def is_captured(tensor: Tensor) -> bool:
    """Whether work on its device is being recorded into a graph: nothing may be waited for."""
    device = tensor.device
    if device.type == "cpu":
        return False
    if device.type == "cuda":
        return torch.cuda.is_current_stream_capturing()
    if not _has_streams(device.type):
        return False
    asked = getattr(_current_stream(device), "is_capturing", None)  # since torch 2.13
    return asked is not None and asked()


@functools.cache
def _has_streams(kind: str) -> bool:
    """Whether torch can say which stream is the current one of a type of devices."""
    if kind != accelerator():
        return False
    try:
        _current_stream(torch.device(kind, 0))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _current_stream(device: torch.device) -> Any:
    if _accelerator is None:
        return torch.cuda.current_stream(device)
    return _accelerator.current_stream(device)


def _new_event(device: torch.device) -> Any:
    if _accelerator is None:
        return torch.cuda.Event()
    return torch.Event(device=device)


# Kernels


def copies_lists_at_once(device: torch.device) -> bool:
    """Whether a copy of a list of tensors is one kernel there, not one for each tensor."""
    return device.type in _types_with_list_kernels()


def have_fused_optimizers(tensors: Iterable[Any]) -> bool:
    """Whether torch's fused optimizers, of an accelerator, work on all of these tensors."""
    kinds = frozenset(_types_with_fused_optimizers()) - {"cpu"}
    found = list(tensors)
    return bool(found) and all(
        isinstance(tensor, Tensor) and tensor.device.type in kinds and tensor.is_floating_point()
        for tensor in found
    )
