"""Devices as commands measure and describe them: time, memory, names, random numbers.

Where a device lacks something, the answer is right without it, as in `torch_private/devices.py`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ampatch.torch_private.devices import (
    UNSUPPORTED_ERRORS,
    accelerator,
    current_stream,
    device_types,
    new_event,
)

VISIBLE = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
}
"""By type of devices: the variable by which a process sees some of them only."""

TOOLKITS = ("cuda", "hip", "xpu")
"""The toolkits for which torch may have been built, by its names in `torch.version`."""


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all its work.  The CPU has no work left to wait for."""
    if device.type == accelerator():
        torch.accelerator.synchronize(device)


def moment(device: torch.device) -> Any:
    """A moment of a device's work, for `seconds_between`: an event in its present stream.

    Nothing waits for it.  Where a device has no events that are timed, the host waits for the
    device and looks at its own clock.
    """
    if not _has_timed_events(device.type):
        synchronize(device)
        return time.perf_counter()
    event = new_event(device, timed=True)
    event.record(current_stream(device))
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
        first, second = (new_event(device, timed=True) for _ in range(2))
        for event in (first, second):
            event.record(current_stream(device))
        second.synchronize()
        first.elapsed_time(second)
    except UNSUPPORTED_ERRORS:
        return False
    return True


def peak_memory() -> int | None:
    """The most bytes that this process held on all its accelerators together.

    None where it has used none, and where torch keeps no such figure.
    """
    peaks = _peaks()
    return None if peaks is None else sum(peaks.values()) or None


def used_accelerators() -> list[torch.device]:
    """The accelerators that this process has had tensors on.

    Where torch keeps no figures of their memory, the current one.
    """
    kind = accelerator()
    if kind is None or not _is_begun(kind):
        return []
    peaks = _peaks()
    return (
        [torch.device(kind)]
        if peaks is None
        else [device for device, peak in peaks.items() if peak]
    )


def _peaks() -> dict[torch.device, int] | None:
    """The most bytes that this process held, by accelerator."""
    kind = accelerator()
    if kind is None or not _is_begun(kind):
        return None
    general = torch.accelerator.max_memory_allocated
    peak_of = getattr(_module(kind), "max_memory_allocated", general)
    try:
        return {torch.device(kind, index): peak_of(index) for index in range(device_count(kind))}
    except UNSUPPORTED_ERRORS:
        return None


def _is_begun(kind: str) -> bool:
    """Whether this process has begun to use the accelerators.  The question starts nothing."""
    return getattr(_module(kind), "is_initialized", lambda: True)()


# Machines


def device_count(kind: str) -> int:
    """How many devices of a type there are; 0 for a type that this torch does not know."""
    get_count = getattr(_module(kind), "device_count", None)
    return 0 if get_count is None else get_count()


def device_name(device: torch.device) -> str:
    """The name of the product where torch tells it, else the type of the device."""
    get_name = getattr(_module(device.type), "get_device_name", None)
    return device.type if get_name is None else get_name(device)


def describe_accelerators() -> list[str]:
    """Each accelerator: its type, its name, and on CUDA its compute capability.

    Tensor Cores take float16 from 7.0 and bfloat16 from 8.0 on.
    """
    kind = accelerator()
    devices = (
        () if kind is None else (torch.device(kind, index) for index in range(device_count(kind)))
    )
    return [_described(device) for device in devices]


def _described(device: torch.device) -> str:
    words, name = [str(device)], device_name(device)
    if name != device.type:
        words.append(name)
    if device.type == "cuda":
        words.append("({}.{})".format(*torch.cuda.get_device_capability(device)))
    return " ".join(words)


def toolkit_versions() -> dict[str, str]:
    """The toolkits that this torch was built for, with their versions; none: for the CPU alone."""
    versions = {name: getattr(torch.version, name, None) for name in TOOLKITS}
    return {name: version for name, version in versions.items() if version}


def has_tf32() -> bool:
    """Whether products of FP32 numbers may be taken in TF32 here."""
    return accelerator() == "cuda"


def replay_random_numbers() -> Callable[[], AbstractContextManager[None]]:
    """Returns a context manager factory; inside, random numbers are those that follow this call.

    They come from torch, Python's `random` and NumPy's global generator, if NumPy is imported.
    Outside of the context managers the generators are unchanged.
    """
    kind = accelerator()
    tools: list[Any] = [torch] if kind is None else [torch, _module(kind)]
    generators = [(tool.get_rng_state, tool.set_rng_state) for tool in tools]
    generators.append((random.getstate, random.setstate))
    if (numpy := sys.modules.get("numpy")) is not None:
        generators.append((numpy.random.get_state, numpy.random.set_state))
    saved = [get() for get, _ in generators]

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        now = [get() for get, _ in generators]
        for (_, put), state in zip(generators, saved):
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
