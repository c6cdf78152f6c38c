"""Exact counts per training step: operators, casts, host syncs, Python calls.  Free of noise.

    python benchmarks/counts.py [--dtype bfloat16] [--out FILE.md]

Operators are the calls that reach a dispatch mode, below autograd.  A cast is a
`_to_copy` to another dtype; a batched cast (`_foreach_copy_`) is one operator and
no cast.  A host sync is a `_local_scalar_dense`: the host reads a number.  Python calls are
the functions written in Python that are entered, of torch, of ampatch and of the script.
With AMPATCH_NATIVE=0 it counts the Python way where the native part is built.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from models import DISPATCH_BOUND
from systems import AUTOCAST, FP32, HALF, make_step
from torch.utils._python_dispatch import TorchDispatchMode
from workers import machine

import ampatch as amp

SYSTEMS = [FP32, HALF, AUTOCAST, "O1", "O2", "O3"]
WARM_UP = 3


class Counts(NamedTuple):
    """Per training step."""

    operators: int
    casts: int
    syncs: int
    calls: int


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators = self.casts = self.syncs = 0

    def __torch_dispatch__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        self.operators += 1
        if function is torch.ops.aten._to_copy.default:
            self.casts += out.dtype is not args[0].dtype
        self.syncs += function is torch.ops.aten._local_scalar_dense.default
        return out


def count(
    name: str, system: str, optimizer: str = "ordinary", dtype: torch.dtype = torch.bfloat16
) -> Counts:
    """What one step of a model under a system does, after some steps to warm up."""
    torch.manual_seed(0)
    try:
        step = make_step(DISPATCH_BOUND[name](), system, optimizer, dtype)
        return count_step(step)
    finally:
        amp.deactivate()


def count_step(step: Callable[[], None]) -> Counts:
    """The counts of one call, after some calls to warm up."""
    for _ in range(WARM_UP):
        step()
    with _Counter() as counter:
        step()
    return Counts(counter.operators, counter.casts, counter.syncs, _python_calls(step))


def _python_calls(step: Callable[[], None]) -> int:
    entered = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal entered
        entered += event == "call"

    gc.disable()  # what it calls belongs to no step
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return entered


def report(dtype: torch.dtype) -> str:
    """The table, in Markdown."""
    lines = [
        f"Operators / casts / host syncs / Python calls per training step, {dtype}, SGD.",
        f"{machine()}.",
        "",
        "| | optimizer | " + " | ".join(SYSTEMS) + " |",
        "|---" * (len(SYSTEMS) + 2) + "|",
    ]
    for name in DISPATCH_BOUND:
        for optimizer in ("ordinary", "fused"):
            cells = []
            for system in SYSTEMS:
                if (system, optimizer) in (("O3", "fused"), (HALF, "fused")):
                    cells.append("none")  # fused SGD leaves half weights as they are on the CPU
                    continue
                found = count(name, system, optimizer, dtype)
                cells.append(" / ".join(map(str, found)))
            lines.append(f"| {name} | {optimizer} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Count, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = report(getattr(torch, options.dtype))
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
