"""Which kinds of devices there are, and what each of them can do: the one module that knows.

Everything is asked through `torch.accelerator`, so that any accelerator that torch knows is
served.  A torch without it (before 2.6) knows CUDA.  Where a device lacks streams, events, graphs
or figures of its memory, the answer is the one that is right without them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import platform
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .lookup import of_torch

_accelerator = of_torch("torch.accelerator", None)

# Every torch has these kernels on CUDA.
_types_with_fused_optimizers = of_torch(
    "torch.utils._foreach_utils._get_fused_kernels_supported_devices", lambda: ["cuda"]
)
_types_with_list_kernels = of_torch(
    "torch.utils._foreach_utils._get_foreach_kernels_supported_devices", lambda: ["cuda"]
)


VISIBLE = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
}
"""By type of devices: the variable by which a process sees some of them only."""

TOOLKITS = ("cuda", "hip", "xpu")
"""What torch may have been built for, by its own names in `torch.version`."""


_BFLOAT16 = {
    False: ("_is_avx512_bf16_supported", "_is_amx_tile_supported"),
    True: ("_is_mkldnn_bf16_supported",),
}
"""By whether the CPU is an ARM: what torch has of the questions about bfloat16."""

_NOT_THERE = (RuntimeError, NotImplementedError, AttributeError)
"""What torch raises where a type of devices cannot do what is asked."""


def accelerator() -> str | None:
    """The type of the accelerator, as in `tensor.device.type`; None: there is none."""
    if not _functions().is_available():
        return None
    if _accelerator is None:
        return "cuda"
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


# Memory


def is_owned_by_host(device: torch.device) -> bool:
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


class LateCopy:
    """Numbers of a device on their way to the host, which does not wait for them.

    Where a device has no events, or no pinned memory, the host waits once, here.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._event: Any = None
        if is_owned_by_host(numbers.device):
            self._host = numbers.clone()
            return
        try:
            self._host = torch.empty(
                numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True
            )
            self._event = _new_event(numbers.device)
        except _NOT_THERE:
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
    except _NOT_THERE:
        return False
    return True


def _functions() -> Any:
    """The module with functions of accelerators; CUDA's has them by the same names."""
    return torch.cuda if _accelerator is None else _accelerator


def _current_stream(device: torch.device) -> Any:
    return _functions().current_stream(device)


def _new_event(device: torch.device, *, timed: bool = False) -> Any:
    if _accelerator is None:
        return torch.cuda.Event(enable_timing=timed)
    return torch.Event(device=device, enable_timing=timed)


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


# Measuring


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all its work; what a CPU was given to do is done."""
    if device.type == accelerator():
        _functions().synchronize(device)


def moment(device: torch.device) -> Any:
    """A moment of a device's work, for `seconds_between`: an event in its present stream.

    Nothing waits for it.  Where a device has no events that are timed, the host waits for the
    device and looks at its own clock.
    """
    if not _has_timed_events(device.type):
        wait_for(device)
        return time.perf_counter()
    event = _new_event(device, timed=True)
    event.record(_current_stream(device))
    return event


def seconds_between(moments: Sequence[Any]) -> list[float]:
    """The seconds from each moment to the next; waits for the last one."""
    if not moments or isinstance(moments[-1], float):
        return [later - earlier for earlier, later in itertools.pairwise(moments)]
    moments[-1].synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(moments)]


@functools.cache
def _has_timed_events(kind: str) -> bool:
    """Whether events of a type of devices can be recorded, and the time between two be told."""
    if kind != accelerator():
        return False
    device = torch.device(kind)
    try:
        first, second = (_new_event(device, timed=True) for _ in range(2))
        for event in (first, second):
            event.record(_current_stream(device))
        second.synchronize()
        first.elapsed_time(second)
    except _NOT_THERE:
        return False
    return True


def peak_memory() -> int | None:
    """The most bytes that this process held on all its accelerators together.

    None where it has used none, and where torch keeps no such figure.
    """
    peaks = _peaks()
    return None if peaks is None else sum(peaks.values()) or None


def used() -> list[torch.device]:
    """The accelerators that this process has had tensors on.

    Where torch keeps no figures of their memory, the current one.
    """
    kind = accelerator()
    if kind is None or not _is_begun(kind):
        return []
    peaks = _peaks()
    return [torch.device(kind)] if peaks is None else [one for one, peak in peaks.items() if peak]


def _peaks() -> dict[torch.device, int] | None:
    """The most bytes that this process held, by accelerator."""
    kind = accelerator()
    if kind is None or not _is_begun(kind):
        return None
    asked = getattr(_module(kind), "max_memory_allocated", None)
    asked = asked or getattr(_accelerator, "max_memory_allocated", None)  # since torch 2.9
    if asked is None:
        return None
    try:
        return {torch.device(kind, index): asked(index) for index in range(count(kind))}
    except _NOT_THERE:
        return None


def _is_begun(kind: str) -> bool:
    """Whether this process has begun to use the accelerators; to look begins nothing."""
    return getattr(_module(kind), "is_initialized", lambda: True)()


# Machines


def count(kind: str) -> int:
    """How many devices of a type there are; 0 for a type that this torch does not know."""
    asked = getattr(_module(kind), "device_count", None)
    return 0 if asked is None else asked()


def name_of(device: torch.device) -> str:
    """The name of the product where torch tells it, else the type of the device."""
    asked = getattr(_module(device.type), "get_device_name", None)
    return device.type if asked is None else asked(device)


def described() -> list[str]:
    """Each accelerator: its type, its name, and on CUDA its compute capability.

    Tensor Cores take float16 from 7.0 and bfloat16 from 8.0 on.
    """
    kind = accelerator()
    found = () if kind is None else (torch.device(kind, index) for index in range(count(kind)))
    return [_described(one) for one in found]


def _described(device: torch.device) -> str:
    parts, name = [str(device)], name_of(device)
    if name != device.type:
        parts.append(name)
    if device.type == "cuda":
        parts.append("({}.{})".format(*torch.cuda.get_device_capability(device)))
    return " ".join(parts)


def built_for() -> dict[str, str]:
    """The toolkits that this torch was built for, with their versions; none: for the CPU alone."""
    found = {name: getattr(torch.version, name, None) for name in TOOLKITS}
    return {name: version for name, version in found.items() if version}


def has_tf32() -> bool:
    """Whether products of FP32 numbers may be taken in TF32 here."""
    return accelerator() == "cuda"


def random_numbers_again() -> Callable[[], AbstractContextManager[None]]:
    """Makes context managers in which random numbers are those that follow on this call.

    Those of torch, of Python's `random` and of NumPy's global generator, if that is imported.
    Outside of them, and after them, random numbers go on untouched.
    """
    found = accelerator()
    tools: list[Any] = [torch] if found is None else [torch, _module(found)]
    generators = [(tool.get_rng_state, tool.set_rng_state) for tool in tools]
    generators.append((random.getstate, random.setstate))
    if (numpy := sys.modules.get("numpy")) is not None:
        generators.append((numpy.random.get_state, numpy.random.set_state))
    then = [get() for get, _ in generators]

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        now = [get() for get, _ in generators]
        for (_, put), state in zip(generators, then):
            put(state)
        try:
            yield
        finally:
            for (_, put), state in zip(generators, now):
                put(state)

    return again


def seeding_functions() -> dict[str, tuple[str, ...]]:
    """The functions that seed accelerators, by name, each with the modules that have it."""
    kinds = dict.fromkeys(("cuda", *device_types()[1:]))
    return {
        f"torch.{kind}.{name}": (f"torch.{kind}", f"torch.{kind}.random")
        for kind in kinds
        for name in ("manual_seed", "manual_seed_all")
        if hasattr(_module(kind), name)
    }


def _module(kind: str) -> Any:
    """`torch.cuda` and its siblings; None: there is none."""
    return getattr(torch, kind, None)
