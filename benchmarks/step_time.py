"""Speed of a training step at O0 to O3 and under torch.autocast, beside O0.

    python benchmarks/step_time.py [--dtype bfloat16] [--rounds 12] [--out FILE.md]

The model is compute-bound, so that the half type's own speed shows: an MLP of
three 1024 x 1024 layers and a small conv net.  O0 is measured twice; believe a
ratio only when `O0 again` is near 1.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from workers import machine, measure, speed_ups

import ampatch as amp

SYSTEMS = ["O0", "O0 again", "O1", "O2", "O3", "torch.autocast"]


def mlp() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Three wide layers; input (256, 1024)."""
    model = nn.Sequential(
        nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    return model, torch.randn(256, 1024), torch.randint(0, 10, (256,))


def conv_net() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Convolutions with BatchNorm; input (32, 16, 32, 32)."""
    model = nn.Sequential(
        nn.Conv2d(16, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return model, torch.randn(32, 16, 32, 32), torch.randint(0, 10, (32,))


MODELS = {"MLP 1024": mlp, "conv net 64": conv_net}


def make_step(name: str, dtype: str, device: str, system: str) -> Callable[[], None]:
    """The function that does one step of model `name` under `system`."""
    torch.manual_seed(0)
    model, inputs, targets = MODELS[name]()
    model, inputs, targets = model.to(device), inputs.to(device), targets.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if system == "torch.autocast":
        return _autocast_step(model, optimizer, inputs, targets, getattr(torch, dtype), device)
    amp.initialize(model, optimizer, opt_level=system[:2], dtype=dtype, verbosity=0)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        _wait(device)

    return step


def _autocast_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    dtype: torch.dtype,
    device: str,
) -> Callable[[], None]:
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=dtype):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        _wait(device)

    return step


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def report(options: argparse.Namespace) -> str:
    """The table, in Markdown."""
    lines = [
        f"Speed of a step over O0's, above 1 is faster, {options.dtype} on {options.device}: "
        f"median and quartiles of {options.rounds} interleaved rounds of {options.steps} steps, "
        f"{options.threads} thread(s).",
        f"{machine()}.",
        "",
        "| | " + " | ".join(SYSTEMS) + " |",
        "|---" * (len(SYSTEMS) + 1) + "|",
    ]
    for name in MODELS:
        make = functools.partial(make_step, name, options.dtype, options.device)
        times = measure(
            make,
            SYSTEMS,
            rounds=options.rounds,
            steps=options.steps,
            warm_up=options.warm_up,
            threads=options.threads,
        )
        cells = [
            f"{middle:.2f} ({low:.2f} to {high:.2f})"
            for low, middle, high in speed_ups(times, "O0").values()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = report(options)
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
