"""The software and the machine that a sweep ran on, for its report."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from ampatch._version import __version__

_CPUINFO = Path("/proc/cpuinfo")


def versions() -> dict[str, str]:
    """Software and machine.  The runs name the GPUs: asking here would occupy one."""
    known = {
        "ampatch": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": f"{_cpu()}, {os.cpu_count()} cores",
    }
    return {name: value for name, value in known.items() if value}


def _cpu() -> str:
    """The name of the CPU, or its architecture where the name is unknown."""
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()
