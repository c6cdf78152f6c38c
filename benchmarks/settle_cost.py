"""What it costs at O2 to compare all half weights with their masters, once before each step.

    python benchmarks/settle_cost.py > benchmarks/results/DATE-settle-cost.md

One process, one thread, bfloat16, Adam, processor time.  Whole training steps and comparisons take
turns in rounds; a figure is the median over rounds with quartiles.  What a forward asks (versions
of masters, gradients left by plain backward passes) is priced beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from workers import machine

import ampatch
from ampatch.session.registry import registry

ROUNDS = 40


def linears(count: int, width: int) -> nn.Module:
    """`count` layers, two weights each."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "200 Linear(8, 8), batch 8": (lambda: linears(200, 8), 8, 8),
    "50 Linear(64, 64), batch 64": (lambda: linears(50, 64), 64, 64),
    "16 Linear(512, 512), batch 256": (lambda: linears(16, 512), 512, 256),
    "16 Linear(512, 512), batch 2048": (lambda: linears(16, 512), 512, 2048),
}


def microseconds(call: Callable[[], object], repeats: int) -> float:
    """Processor time of one call."""
    started = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - started) / repeats * 1e6


def spread(values: list[float], digits: int) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def row(name: str) -> str:
    """One line of the table."""
    build, width, batch = MODELS[name]
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=torch.bfloat16, verbosity=0)
    inputs, managed = torch.randn(batch, width), registry.optimizers.managed(optimizer)

    def step() -> None:
        optimizer.zero_grad()
        with ampatch.scale_loss(model(inputs).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    for _ in range(5):
        step()
    steps, settled, shares, asked = [], [], [], []
    for _ in range(ROUNDS):
        steps.append(microseconds(step, 3))
        settled.append(microseconds(managed.masters.settle, 10))
        asked.append(microseconds(lambda: managed.before_forward(None, True), 10))
        shares.append(100 * settled[-1] / steps[-1])
    ampatch.deactivate()
    figures = [spread(steps, 0), spread(settled, 0), spread(shares, 2), spread(asked, 0)]
    return f"| {name} | " + " | ".join(figures) + " |"


def main() -> None:
    """Print the page."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    print(f"Microseconds of processor time, {ROUNDS} interleaved rounds: median and quartiles.")
    print(f"{machine()}.\n")
    print("| model | a step at O2 | the comparison | per cent of a step | before a forward |")
    print("|---|---|---|---|---|")
    for name in MODELS:
        print(row(name), flush=True)


if __name__ == "__main__":
    main()
