"""The report of `ampatch doctor`: versions, devices, and the speed of the half types here.

A report about a problem should begin with it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import torch

import ampatch
from ampatch import native
from ampatch._version import __version__
from ampatch.config.environment import OF_THE_PROCESS, VARIABLES
from ampatch.diagnose.dtype_names import dtype_name
from ampatch.diagnose.tables import content

MEASURE_FOR = 0.15  # seconds for each operator and dtype


EXTRAS = ("numpy", "rich", "matplotlib", "scikit-learn", "scipy", "tensorboard")


def write_report(stream: TextIO) -> None:
    """Write everything to `stream`; takes about two seconds."""
    for name, value in facts():
        print(f"{name:<22}{value}", file=stream)
    print("\nSpeed relative to FP32, forward and backward; below 1 is slower:", file=stream)
    for device in devices():
        speeds = measure(device)
        for line in speed_lines(device, speeds):
            print(f"  {line}", file=stream)
        print(f"  Faster than FP32 on {device}: {fast(speeds)}.", file=stream)


def as_dict() -> dict[str, Any]:
    """Everything, for JSON."""
    speeds = {device: measure(device) for device in devices()}
    return {
        "versions": {"python": platform.python_version(), "ampatch": __version__}
        | {name: _version(name) for name in ("torch", "wrapt")},
        "extras": {name: _version(name) for name in EXTRAS},
        "platform": platform.platform(),
        "native_part": native.status().reason,
        "missing_in_torch": content.missing(),
        "cpu_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "cuda_devices": cuda_devices(),
        "apex": _apex(),
        "environment": environment(),
        "speed": {
            device: {dtype_name(dtype): ratios for dtype, ratios in found.items()}
            for device, found in speeds.items()
        },
    }


def facts() -> Iterator[tuple[str, str]]:
    """Pairs of a name and its value."""
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "ampatch", __version__
    for package in ("torch", "wrapt"):
        yield package, _version(package) or "not installed"
    for package in EXTRAS:
        yield package, _version(package) or "not installed (optional)"
    yield "native part", native.status().reason
    yield "not in this torch", ", ".join(content.missing()) or "nothing that ampatch patches"
    yield "cpu threads", str(torch.get_num_threads())
    yield "cuda", torch.version.cuda or "not in this build of torch"
    yield "cuda devices", ", ".join(cuda_devices()) or "none"
    yield "apex", _apex()
    for name, value in environment().items():
        yield name, "not set" if value is None else value


def cuda_devices() -> list[str]:
    """Names with compute capability; Tensor Cores: float16 from 7.0, bfloat16 from 8.0."""
    return [
        "{} ({}.{})".format(
            torch.cuda.get_device_name(index), *torch.cuda.get_device_capability(index)
        )
        for index in range(torch.cuda.device_count())
    ]


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


def devices() -> list[str]:
    """The device types that are measured."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def measure(device: str) -> dict[torch.dtype, dict[str, float]]:
    """Speed of a matmul and a convolution in each half type, relative to FP32."""
    with ampatch.disable_casts():
        single = [_time(run, device) for run in operators(device, torch.float32)]
        found = {}
        for dtype in (torch.float16, torch.bfloat16):
            half = [_time(run, device) for run in operators(device, dtype)]
            ratios = [base / seconds for base, seconds in zip(single, half, strict=True)]
            found[dtype] = dict(zip(("matmul", "conv2d"), ratios, strict=True))
    return found


def speed_lines(device: str, speeds: dict[torch.dtype, dict[str, float]]) -> Iterator[str]:
    """A line for each half type."""
    for dtype, ratios in speeds.items():
        yield (
            f"{device:<6}{dtype_name(dtype):<10}"
            + "   ".join(f"{name} {ratio:.2g}x" for name, ratio in ratios.items())
        )


def fast(speeds: dict[torch.dtype, dict[str, float]]) -> str:
    """Names of the half types that are faster than FP32 in every measurement."""
    found = [dtype_name(dtype) for dtype, ratios in speeds.items() if min(ratios.values()) > 1]
    return ", ".join(found) or "no half type"


def operators(device: str, dtype: Any) -> list[Callable[[], Any]]:
    """A matmul and a convolution, each with its backward pass, which can be slower."""

    def leaf(*shape: int) -> Any:
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    side, batch, channels = (256, 8, 16) if device == "cpu" else (4096, 128, 64)
    pairs = [
        (leaf(side, side), leaf(side, side)),
        (leaf(batch, channels, 16, 16), leaf(channels, channels, 3, 3)),
    ]
    functions: list[Callable[..., Any]] = [
        torch.matmul,
        functools.partial(torch.nn.functional.conv2d, padding=1),
    ]

    def training(function: Callable[..., Any], inputs: tuple) -> Callable[[], Any]:
        result = function(*inputs)
        grad = torch.ones_like(result)
        return lambda: torch.autograd.grad(function(*inputs), inputs, grad)

    return [training(function, inputs) for function, inputs in zip(functions, pairs)]


def _time(run: Callable[[], Any], device: str) -> float:
    """The shortest time of `run` within `MEASURE_FOR` seconds."""

    def once() -> float:
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    end = time.perf_counter() + MEASURE_FOR
    best = once()
    while time.perf_counter() < end:
        best = min(best, once())
    return best


def _version(package: str) -> str | None:
    """The installed version of `package`, or None; the package is not imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
