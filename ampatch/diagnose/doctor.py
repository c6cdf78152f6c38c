"""What `ampatch doctor` reports: versions, devices, and how fast the half types are here.

It is what a report about a problem should begin with.
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

from ampatch._version import __version__
from ampatch.environment import VARIABLES
from ampatch.tables_command import content

MEASURE_FOR = 0.15  # seconds for each operator and dtype


def write_report(stream: TextIO) -> None:
    """Write everything to `stream`; takes about two seconds."""
    for name, value in facts():
        print(f"{name:<22}{value}", file=stream)
    print("\nSpeed relative to FP32, forward and backward; below 1 is slower:", file=stream)
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        for line in speeds(device):
            print(f"  {line}", file=stream)


def facts() -> Iterator[tuple[str, str]]:
    """Names and values, one a line."""
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "ampatch", __version__
    for package in ("torch", "wrapt", "rich", "matplotlib"):
        yield package, _version(package)
    yield "not in this torch", ", ".join(content.missing()) or "nothing that ampatch patches"
    yield "cpu threads", str(torch.get_num_threads())
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield "cuda devices", ", ".join(gpus) or "none"
    yield "apex", _apex()
    for name in VARIABLES:
        yield name, os.environ.get(name, "not set")


def _apex() -> str:
    """Whether NVIDIA's apex, or something by its name, would be imported."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "not installed"
    return f"importable, from {spec.origin or 'a directory without __init__.py'}"


def speeds(device: str) -> Iterator[str]:
    """A line for each half type: how fast a matmul and a convolution are in it."""
    single = [_time(run, device) for run in _operators(device, torch.float32)]
    for dtype in (torch.float16, torch.bfloat16):
        half = [_time(run, device) for run in _operators(device, dtype)]
        matmul, conv = (base / seconds for base, seconds in zip(single, half))
        yield (
            f"{device:<6}{str(dtype).removeprefix('torch.'):<10}"
            f"matmul {matmul:.2g}x   conv2d {conv:.2g}x"
        )


def _operators(device: str, dtype: Any) -> list[Callable[[], Any]]:
    """A matmul and a convolution with their backward passes, which can be the slow ones."""

    def leaf(*shape: int) -> Any:
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    side, batch, channels = (256, 8, 16) if device == "cpu" else (4096, 128, 64)
    pairs = [
        (leaf(side, side), leaf(side, side)),
        (leaf(batch, channels, 16, 16), leaf(channels, channels, 3, 3)),
    ]
    functions = [torch.matmul, functools.partial(torch.nn.functional.conv2d, padding=1)]

    def training(function: Callable[..., Any], inputs: tuple) -> Callable[[], Any]:
        result = function(*inputs)
        grad = torch.ones_like(result)
        return lambda: torch.autograd.grad(function(*inputs), inputs, grad)

    return [training(function, inputs) for function, inputs in zip(functions, pairs)]


def _time(run: Callable[[], Any], device: str) -> float:
    """The shortest of the times that `run` takes within `MEASURE_FOR` seconds."""

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


def _version(package: str) -> str:
    """The installed version of `package`, which need not have been imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
