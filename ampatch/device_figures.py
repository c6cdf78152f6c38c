"""Measures and describes devices for commands: time, memory, names, random number generators.

If a device lacks a feature, the functions here still return a valid result, as in
`torch_private/devices.py`.
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

VISIBLE_DEVICES = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
}
"""By device type: the environment variable that limits which devices a process sees."""

TOOLKITS = ("cuda", "hip", "xpu")
"""The toolkits for which torch may have been built, by their names in `torch.version`."""


def synchronize(device: torch.device) -> None:
    """Synchronize with a device.  Does nothing for the CPU."""
    if device.type == accelerator():
        torch.accelerator.synchronize(device)


def record_time(device: torch.device) -> Any:
    """Record the time for `seconds_between`, by an event in the device's current stream.

    Does not synchronize with the device.  If the device has no timed events, synchronizes and
    returns the host's clock.
    """
    if not _has_timed_events(device.type):
        synchronize(device)
        return time.perf_counter()
    event = new_event(device, timed=True)
    event.record(current_stream(device))
    return event


def seconds_between(moments: Sequence[Any]) -> list[float]:
    """The seconds from each recorded time to the next.  Synchronizes with the last one."""
    if not moments or isinstance(moments[-1], float):
        return [later - earlier for earlier, later in itertools.pairwise(moments)]
    moments[-1].synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(moments)]


@functools.cache
def _has_timed_events(kind: str) -> bool:
    """Whether a device type has events, and the time between two of them can be measured."""
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
    """The sum over all accelerators of the peak bytes of this process's tensors.

    None if the process has used no accelerator, or if torch keeps no such statistics.
    """
    peaks = _peaks()
    return None if peaks is None else sum(peaks.values()) or None


def used_accelerators() -> list[torch.device]:
    """The accelerators on which this process has had tensors.

    The current accelerator if torch keeps no memory statistics.
    """
    kind = accelerator()
    if kind is None or not _is_initialized(kind):
        return []
    peaks = _peaks()
    return (
        [torch.device(kind)]
        if peaks is None
        else [device for device, peak in peaks.items() if peak]
    )


def _peaks() -> dict[torch.device, int] | None:
    """The peak bytes of this process's tensors, by accelerator."""
    kind = accelerator()
    if kind is None or not _is_initialized(kind):
        return None
    general = torch.accelerator.max_memory_allocated
    peak_of = getattr(_module(kind), "max_memory_allocated", general)
    try:
        return {torch.device(kind, index): peak_of(index) for index in range(device_count(kind))}
    except UNSUPPORTED_ERRORS:
        return None


def _is_initialized(kind: str) -> bool:
    """Whether this process has initialized the accelerators.  Does not initialize them."""
    return getattr(_module(kind), "is_initialized", lambda: True)()


# Machines


def device_count(kind: str) -> int:
    """The number of devices of a type; 0 for a type that this torch does not know."""
    get_count = getattr(_module(kind), "device_count", None)
    return 0 if get_count is None else get_count()


def device_name(device: torch.device) -> str:
    """The device's product name, or its type if torch does not tell the name."""
    get_name = getattr(_module(device.type), "get_device_name", None)
    return device.type if get_name is None else get_name(device)


def describe_accelerators() -> list[str]:
    """Describe each accelerator: its type, its name, and on CUDA its compute capability.

    Tensor Cores support float16 from 7.0 and bfloat16 from 8.0 on.
    """
    kind = accelerator()
    devices = (
        () if kind is None else (torch.device(kind, index) for index in range(device_count(kind)))
    )
    return [_describe(device) for device in devices]


def _describe(device: torch.device) -> str:
    words, name = [str(device)], device_name(device)
    if name != device.type:
        words.append(name)
    if device.type == "cuda":
        words.append("({}.{})".format(*torch.cuda.get_device_capability(device)))
    return " ".join(words)


def toolkit_versions() -> dict[str, str]:
    """The versions of the toolkits for which this torch was built.  Empty: for the CPU only."""
    versions = {name: getattr(torch.version, name, None) for name in TOOLKITS}
    return {name: version for name, version in versions.items() if version}


def has_tf32() -> bool:
    """Whether matrix products of FP32 tensors may run in TF32 on this machine's accelerator."""
    return accelerator() == "cuda"


def replay_random_numbers() -> Callable[[], AbstractContextManager[None]]:
    """Return a factory of context managers in which the random numbers after this call repeat.

    For torch, Python's `random` and, if NumPy is imported, its global generator.  Outside of the
    context managers the generators are unchanged.
    """
    kind = accelerator()
    tools: list[Any] = [torch] if kind is None else [torch, _module(kind)]
    generators = [(tool.get_rng_state, tool.set_rng_state) for tool in tools]
    generators.append((random.getstate, random.setstate))
    if (numpy := sys.modules.get("numpy")) is not None:
        generators.append((numpy.random.get_state, numpy.random.set_state))
    saved = [get() for get, _ in generators]

    @contextlib.contextmanager
    def replayed() -> Iterator[None]:
        now = [get() for get, _ in generators]
        for (_, put), state in zip(generators, saved):
            put(state)
        try:
            yield
        finally:
            for (_, put), state in zip(generators, now):
                put(state)

    return replayed


def seeding_functions() -> dict[str, tuple[str, ...]]:
    """The names of functions that seed accelerators, each with the modules that have it."""
    kinds = dict.fromkeys(("cuda", *device_types()[1:]))
    return {
        f"torch.{kind}.{name}": (f"torch.{kind}", f"torch.{kind}.random")
        for kind in kinds
        for name in ("manual_seed", "manual_seed_all")
        if hasattr(_module(kind), name)
    }


def _module(kind: str) -> Any:
    """The module of a device type, such as `torch.cuda`, or None if there is none."""
    return getattr(torch, kind, None)
