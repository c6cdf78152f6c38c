"""Where a trial runs: alone or beside others, on which devices, with which variables.

An engine gives each trial a `Placement`.  `runner.py` makes the environment of the process from
this placement, and records the placement in the `Run`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ampatch.device_figures import VISIBLE_DEVICES, device_count

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Placement:
    """Where a trial runs.

    With `alone`, no other trial of the sweep uses the same devices (on a CPU: the same machine) at
    the same time.  `devices` are names such as "cuda:1"; if empty, the script sees all devices.
    `variables` are set in the trial's environment; a variable with the value None is removed.
    """

    alone: bool = True
    devices: tuple[str, ...] = ()
    variables: tuple[tuple[str, str | None], ...] = ()

    def apply(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment of a trial: `environment` with the variables of this placement."""
        merged = {**environment, **dict(self.variables), **_visible(self.devices, environment)}
        return {name: value for name, value in merged.items() if value is not None}


def device_groups(devices: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """`devices` in groups of `size`, one group for each trial.  Raises `ValueError`."""
    option = f"--devices {','.join(devices)}"
    device_types = {device.partition(":")[0] for device in devices}
    are_names = all(
        re.fullmatch(rf"({'|'.join(VISIBLE_DEVICES)}):\d+", device) for device in devices
    )
    if not are_names or len(device_types) != 1 or len(set(devices)) != len(devices):
        raise ValueError(
            f"{option}: expected different devices of one kind, such as cuda:0,cuda:1, of the "
            f"kinds {', '.join(VISIBLE_DEVICES)}. On a CPU use --jobs."
        )
    [device_type] = device_types
    existing = device_count(device_type)
    missing = [device for device in devices if int(device.partition(":")[2]) >= existing]
    if missing:
        raise ValueError(
            f"{option}: there is no {missing[0]} on this machine, which has {existing} "
            f"{device_type} devices."
        )
    if len(devices) % size:
        raise ValueError(
            f"{option}: {len(devices)} devices cannot be given to trials of {size} processes each "
            f"(--nproc-per-node). Expected a multiple of {size}."
        )
    return [tuple(devices[start : start + size]) for start in range(0, len(devices), size)]


def _visible(devices: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that shows only these devices, which are numbered among those visible now."""
    if not devices:
        return {}
    name = VISIBLE_DEVICES[devices[0].partition(":")[0]]
    numbers = [device.partition(":")[2] for device in devices]
    visible = [device.strip() for device in environment.get(name, "").split(",") if device.strip()]
    if visible:
        numbers = [visible[int(number)] for number in numbers]
    return {name: ",".join(numbers)}
