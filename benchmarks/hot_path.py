"""What a patched call costs: plain, patched with no policy, patched and casting.

    python benchmarks/hot_path.py

Nanoseconds per call, the least of several repeats, in one process.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable

import torch
from torch import nn
from workers import machine

import ampatch


def nanoseconds(call: Callable[[], object], number: int = 20000) -> float:
    """The least time of seven repeats, less that of an empty call."""

    def best(function: Callable[[], object]) -> float:
        return min(timeit.repeat(function, number=number, repeat=7)) / number * 1e9

    return best(call) - best(lambda: None)


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    full, half = torch.randn(4, 4), torch.randn(4, 4, dtype=torch.bfloat16)
    plain = {
        "mm": nanoseconds(lambda: torch.mm(half, half)),
        "relu": nanoseconds(lambda: torch.relu(full)),
    }
    model = nn.Linear(4, 4)
    ampatch.initialize(model, dtype=torch.bfloat16, patch_scope="process", verbosity=0)
    with ampatch.disable_casts():
        inactive = nanoseconds(lambda: torch.mm(half, half))
    rows = [
        ("torch.mm on half, no ampatch", plain["mm"]),
        ("patched, disable_casts()", inactive),
        ("patched, nothing to cast", nanoseconds(lambda: torch.mm(half, half))),
        ("patched, two casts", nanoseconds(lambda: torch.mm(full, full))),
        ("torch.relu (in no table), no ampatch", plain["relu"]),
        ("torch.relu (in no table), ampatch on", nanoseconds(lambda: torch.relu(full))),
    ]
    print(machine())
    for name, value in rows:
        print(f"{value:8.0f} ns  {name}")


if __name__ == "__main__":
    main()
