"""What a step asks of a device, counted exactly on a fake accelerator: launches, casts, waits.

Launches are operators that give work to the device: views, allocations and metadata are none, and
a call on a list of tensors (`_foreach_*`, a fused optimizer) is one, as on CUDA.  An operator that
takes several kernels on CUDA (a norm's backward, say) counts as one, so these are no counts of
kernels, but what a system adds to FP32 is: casts and calls on lists take one kernel each (for lists
of up to some 20 million elements).  A wait is whatever makes the host wait for the device.

The models are those for a GPU in depth and structure, narrow; with `--wide` they have their own
width (7 GB of memory).  The inputs are tiny.  Needs a C++ compiler: the device is built from
`tests/helpers/fake_accelerator`.
"""

from __future__ import annotations

import functools
import math
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
from measuring import table
from systems import AUTOCAST, FP32, How, make_step
from tasks import NARROW, ON_A_DEVICE, WIDE

import ampatch as amp

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
import fake_accelerator
from fake_accelerator import NAME, Counts, counted

SYSTEMS = [AUTOCAST, "O1", "O2", "O3"]
INIT_SCALE = 256.0  # so that no step is skipped
WARM_UP = 4
COUNTED = ("launches", "casts", "list_copies", "waits", "uploads", "downloads")


def count(
    name: str, system: str, optimizer: str, dtype: torch.dtype, size: str = NARROW
) -> tuple[Counts, int]:
    """What one step asks of the device, after some to warm up; and the number of parameters."""
    adamw = functools.partial(torch.optim.AdamW, lr=1e-5, fused=optimizer == "fused")
    how = How(dtype, adamw, device=NAME, always_scaled=False, init_scale=INIT_SCALE)
    torch.manual_seed(0)
    with torch.device(NAME):
        task = ON_A_DEVICE[name][size]()
    weights = list(task.modules[0].parameters())
    try:
        step = make_step(task, system, how)
        for _ in range(WARM_UP):
            step()
        before = [weight.abs().sum().item() for weight in weights]
        with counted() as counts:
            step()
        after = [weight.abs().sum().item() for weight in weights]
        if system != "O3":  # there AdamW's eps is 0 in float16, and NaN follows; it skips nothing
            assert before != after and all(map(math.isfinite, after)), (name, system, dtype)
    finally:
        amp.deactivate()
    return counts, len(weights)


def report(options: Namespace) -> Iterator[str]:
    """A row per model, optimizer, dtype and system."""
    fake_accelerator.load()
    size, rows = WIDE if options.wide else NARROW, []
    for name in options.models or ON_A_DEVICE:
        for optimizer in options.optimizers:
            plain, _ = count(name, FP32, optimizer, torch.float32, size)
            runs = [("float32", FP32), *((d, s) for d in options.dtypes for s in SYSTEMS)]
            for dtype, system in runs:
                counts, parameters = count(name, system, optimizer, getattr(torch, dtype), size)
                cells = [getattr(counts, attribute) for attribute in COUNTED]
                cells.insert(1, f"{counts.launches - plain.launches:+d}")
                rows.append([name, parameters, dtype, optimizer, system, *cells])
    launches, *others = [name.replace("list_copies", "copies of lists") for name in COUNTED]
    head = ["", "parameters", "dtype", "optimizer", "system", launches, "more than FP32", *others]
    yield table(head, rows)
