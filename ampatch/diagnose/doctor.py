"""The report of `ampatch doctor`: versions, devices, and the speed of the half types here.

A report about a problem should begin with it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from typing import Any, TextIO

import torch

from ampatch import native
from ampatch._version import __version__
from ampatch.config.environment import OF_THE_PROCESS, VARIABLES
from ampatch.diagnose.dtype_names import dtype_name
from ampatch.diagnose.speed import HALF_TYPES, SMALLEST, Speed, fast, measure
from ampatch.diagnose.tables import content
from ampatch.torch_private import devices

SPEEDS = (
    "Speed relative to FP32, forward and backward, with the range of three measurements.\n"
    "Above 1 is faster; less than 10 %, or a range that reaches across 1, is a tie."
)
EXTRAS = (
    "numpy", "rich", "matplotlib", "pandas", "scikit-learn", "scipy",
    "ray", "tensorboard", "wandb",
)  # fmt: skip


def write_report(stream: TextIO) -> None:
    """Write everything to `stream`; takes some seconds."""
    for name, value in facts():
        print(f"{name:<22}{value}", file=stream)
    print(f"\n{SPEEDS}", file=stream)
    for device in devices.device_types():
        speeds = measure(device)
        for line in speed_lines(device, speeds):
            print(f"  {line}", file=stream)
        fastest = ", ".join(fast(speeds)) or "no half type"
        print(f"  Faster than FP32 on {device}: {fastest}.", file=stream)


def as_dict() -> dict[str, Any]:
    """Everything, for JSON."""
    speeds = {device: measure(device) for device in devices.device_types()}
    return {
        "versions": {"python": platform.python_version(), "ampatch": __version__}
        | {name: _version(name) for name in ("torch", "wrapt")},
        "extras": {name: _version(name) for name in EXTRAS},
        "platform": platform.platform(),
        "native_part": native_part(),
        "missing_in_torch": content.missing(),
        "cpu_threads": torch.get_num_threads(),
        "torch_built_for": devices.built_for(),
        "accelerators": devices.described(),
        "apex": _apex(),
        "environment": environment(),
        "speed": {device: _by_dtype(found) for device, found in speeds.items()},
        "fast": {device: list(fast(found)) for device, found in speeds.items()},
    }


def _by_dtype(speeds: list[Speed]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for speed in speeds:
        found.setdefault(dtype_name(speed.dtype), {})[speed.operation] = speed.as_dict()
    return found


def facts() -> Iterator[tuple[str, str]]:
    """Pairs of a name and its value."""
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "ampatch", __version__
    for package in ("torch", "wrapt"):
        yield package, _version(package) or "not installed"
    for package in EXTRAS:
        yield package, _version(package) or "not installed (optional)"
    yield "native part", native_part()
    yield "not in this torch", ", ".join(content.missing()) or "nothing that ampatch patches"
    yield "cpu threads", str(torch.get_num_threads())
    toolkits = (f"{name} {version}" for name, version in devices.built_for().items())
    yield "torch built for", ", ".join(toolkits) or "the CPU alone"
    yield "accelerators", ", ".join(devices.described()) or "none"
    yield "apex", _apex()
    for name, value in environment().items():
        yield name, "not set" if value is None else value


def native_part() -> str:
    """Whether it is in force, and what keeps it from being built."""
    return "; ".join(filter(None, [native.status().reason, native.missing()]))


def environment() -> dict[str, str | None]:
    """Each variable that ampatch reads, and others with its prefix, which may be misspelt."""
    others = sorted(name for name in os.environ if name.startswith("AMPATCH_"))
    names = dict.fromkeys((*VARIABLES, *OF_THE_PROCESS, *others))
    return {name: os.environ.get(name) for name in names}


def _apex() -> str:
    """Whether `import apex` finds a package, and where."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "not installed"
    return f"importable, from {spec.origin or 'a directory without __init__.py'}"


def speed_lines(device: str, speeds: list[Speed]) -> Iterator[str]:
    """A line for each operation and dtype; FP32's are the noise of the machine."""
    for dtype in (*HALF_TYPES, torch.float32):
        for speed in speeds:
            if speed.dtype is dtype:
                name = dtype_name(dtype)
                said = f"{name} {speed.verdict}" if dtype in HALF_TYPES else "(against itself)"
                yield f"{device:<6}{name:<10}{speed.operation:<8}{_figure(speed):<24}{said}"


def _figure(speed: Speed) -> str:
    spread = f" ({speed.low:.2f} to {speed.high:.2f})" if speed.high >= SMALLEST else ""
    return f"{speed.shown()}{spread}"


def _version(package: str) -> str | None:
    """The installed version of `package`, or None; the package is not imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
