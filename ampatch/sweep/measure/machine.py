"""The software and the machine that a sweep ran on, for its report."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from ampatch import native
from ampatch._version import __version__
from ampatch.torch_private import devices

_CPUINFO = Path("/proc/cpuinfo")


def versions() -> dict[str, str]:
    """Software and machine.  The runs name the GPUs: asking here would occupy one."""
    known = {
        "ampatch": __version__,
        "torch": torch.__version__,
        **devices.built_for(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": f"{_cpu()}, {os.cpu_count()} cores",
    }
    return {name: value for name, value in known.items() if value}


def state_of_the_machine() -> dict[str, Any]:
    """What timings depend on, for the record of a run: native part, load, threads."""
    return {
        "native": native.status().in_force,
        **load("load_at_start"),
        "threads": torch.get_num_threads(),
        "cores": usable_cores(),
    }


def load(name: str) -> dict[str, float]:
    """The load average over a minute under this name; empty where there is none (Windows)."""
    return {name: round(os.getloadavg()[0], 2)} if hasattr(os, "getloadavg") else {}


def usable_cores() -> int | None:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _cpu() -> str:
    """The name of the CPU, or its architecture where the name is unknown."""
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()
