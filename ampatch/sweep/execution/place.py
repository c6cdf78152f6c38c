"""Where a trial runs: alone or beside others, on which devices, with which variables.

An engine gives each trial its `Place`; `runner.py` makes the process's environment of it
and notes it in the `Run`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ampatch.torch_private.devices import VISIBLE, count

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Place:
    """`alone`: no other trial of the sweep runs on these devices or, on a CPU, on the machine.

    `devices` are names such as "cuda:1"; without any the script finds what the machine has.
    `variables` are set in the trial's environment; those with the value None are removed.
    """

    alone: bool = True
    devices: tuple[str, ...] = ()
    variables: tuple[tuple[str, str | None], ...] = ()

    def apply(self, environment: Mapping[str, str]) -> dict[str, str]:
        """`environment` with the variables of this place."""
        merged = {**environment, **dict(self.variables), **_visible(self.devices, environment)}
        return {name: value for name, value in merged.items() if value is not None}


def device_groups(devices: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """`devices`, checked, in groups of `size`: each trial gets a group.  Raises `ValueError`."""
    said = f"--devices {','.join(devices)}"
    kinds = {_kind(said, device) for device in devices}
    if len(kinds) != 1:
        raise ValueError(f"{said}: expected devices of one kind, such as cuda:0,cuda:1.")
    if len(set(devices)) != len(devices):
        raise ValueError(f"{said}: a device is named twice. A device runs one trial at a time.")
    [kind] = kinds
    there_are = count(kind)
    missing = [device for device in devices if int(device.partition(":")[2]) >= there_are]
    if missing:
        there = f"{kind}:0 to {kind}:{there_are - 1}" if there_are else f"no {kind} device"
        raise ValueError(
            f"{said}: there is no {missing[0]} on this machine, which has {there}. On a CPU use "
            "--jobs."
        )
    if len(devices) % size:
        raise ValueError(
            f"{said}: {len(devices)} devices cannot be given to trials of {size} processes each "
            f"(--nproc-per-node). Expected a multiple of {size}."
        )
    return [tuple(devices[at : at + size]) for at in range(0, len(devices), size)]


def _kind(said: str, device: str) -> str:
    kind, _, index = device.partition(":")
    if kind not in VISIBLE or not index.isdecimal():
        raise ValueError(
            f"{said}: {device!r} is no device to give to a trial. Expected names such as cuda:0, "
            f"of the kinds {', '.join(VISIBLE)}; on a CPU use --jobs."
        )
    return kind


def _visible(devices: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that shows these devices only.  Numbers count in what is visible already."""
    if not devices:
        return {}
    name = VISIBLE[devices[0].partition(":")[0]]
    numbers = [device.partition(":")[2] for device in devices]
    visible = [one.strip() for one in environment.get(name, "").split(",") if one.strip()]
    if visible:
        numbers = [visible[int(number)] for number in numbers]
    return {name: ",".join(numbers)}


def thread_variables(threads: int | None) -> tuple[tuple[str, str | None], ...]:
    """So many threads, unless the user has set a number."""
    if threads is None or THREADS in os.environ:
        return ()
    return ((THREADS, str(threads)),)
