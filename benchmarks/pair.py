"""Two processes of DistributedDataParallel on one device: do they stay equal, and equal to one?

Over gloo, because NCCL takes one process for each GPU.  Each process trains on half of each batch;
in one step the second process alone meets an overflow.  The table says whether the weights of both
processes are the same bits, how far they are from those of one process with whole batches, which
steps were skipped, and the wall time of a step.
"""

from __future__ import annotations

import datetime
import math
import multiprocessing
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import table
from torch import Tensor, nn

import ampatch as amp

NEAR = {"float16": 0.02, "bfloat16": 0.1}
BATCH, WIDTH, OVERFLOW_AT = 32, 64, 3
PATIENCE = datetime.timedelta(seconds=60)


class Run(NamedTuple):
    """Of one process."""

    weights: list[Tensor]
    skipped: list[int]
    seconds: float


def train(level: str, dtype: str, rank: int, ranks: int, options: Namespace) -> Run:
    """The weights after the steps; with one rank no process group is asked for."""
    torch.manual_seed(0)
    hidden = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU()]
    model = nn.Sequential(*hidden, nn.Linear(WIDTH, 4)).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    scale = {"loss_scale": "dynamic", "init_scale": 256.0}
    amp.initialize(model, optimizer, opt_level=level, dtype=dtype, verbosity=0, **scale)
    wrapped = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    data, skipped = torch.Generator().manual_seed(1), []
    begin = time.perf_counter()
    for step in range(options.steps):
        x = torch.randn(BATCH, WIDTH, generator=data)
        y = x[:, :4].argmax(1)
        part = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
        loss = F.cross_entropy(wrapped(x[part].to(options.device)), y[part].to(options.device))
        if step == OVERFLOW_AT and rank == ranks - 1:
            loss = loss * math.inf
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        if amp.step_was_skipped(optimizer):
            skipped.append(step)
    seconds = (time.perf_counter() - begin) / options.steps
    weights = [param.detach().float().cpu() for param in amp.master_params(optimizer)]
    amp.deactivate()
    return Run(weights, skipped, seconds)


def work(rank: int, place: str, options: Namespace) -> None:
    """All runs of one process, in the order of `planned`, into a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{place}", rank=rank, world_size=2, timeout=PATIENCE
    )
    found = [train(level, dtype, rank, 2, options) for level, dtype in planned(options)]
    torch.save([run._asdict() for run in found], f"{place}-{rank}")
    dist.barrier()  # neither ends while the other may still ask it
    dist.destroy_process_group()


def planned(options: Namespace) -> list[tuple[str, str]]:
    """Opt levels and half types."""
    return [(level, dtype) for level in ("O1", "O2") for dtype in options.dtypes]


def both(options: Namespace) -> list[list[Run]]:
    """The runs of each process."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        place, end = f"{folder}/meet", time.monotonic() + options.limit
        processes = [context.Process(target=work, args=(rank, place, options)) for rank in (0, 1)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(end - time.monotonic(), 0))
        for process in processes:
            process.kill()
            process.join()
        codes = [process.exitcode for process in processes]
        if codes != [0, 0]:
            sys.exit(f"the two processes ended with {codes} (-9: after {options.limit:.0f} s)")
        return [[Run(**one) for one in torch.load(f"{place}-{rank}")] for rank in (0, 1)]


def row(level: str, dtype: str, first: Run, second: Run, one: Run) -> list[Any]:
    """Of the table; its last cell says whether all is as it should be."""
    are_equal = all(map(torch.equal, first.weights, second.weights))
    apart = max((a - b).abs().max().item() for a, b in zip(first.weights, one.weights, strict=True))
    skipped = [run.skipped for run in (first, second, one)]
    is_right = are_equal and apart <= NEAR[dtype] and skipped == [[OVERFLOW_AT]] * 3
    told = "the same" if are_equal else "differ"
    steps = " / ".join(map(str, skipped))
    cells = [level, dtype, told, f"{apart:.2g}", steps, f"{first.seconds * 1e3:.2f}"]
    return [*cells, "yes" if is_right else "no"]


def report(options: Namespace) -> Iterator[str]:
    """A row per level and half type."""
    first, second = both(options)
    whole = [train(level, dtype, 0, 1, options) for level, dtype in planned(options)]
    rows = [row(*names, *runs) for names, *runs in zip(planned(options), first, second, whole)]
    head = ["level", "half type", "weights of both", "from one process", "skipped", "ms", "right"]
    yield table(head, rows)
    if any(cells[-1] == "no" for cells in rows):
        sys.exit(1)
