"""Memory of each rank under FSDP2, and distance of the weights from those of FSDP2's own policy."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from counts import LiveBytes
from measuring import table
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ampatch as amp

DTYPE = torch.bfloat16
OWN = "FSDP2's own policy"
ALONE = {"FP32, no shards": "", "O2, no shards": "O2"}
SHARDED = {"FSDP2, FP32": "", OWN: "", "O1": "O1", "O2": "O2", "O3": "O3"}
STEPS, WIDTH, LAYERS, BATCH, LENGTH = 4, 256, 6, 4, 32
TOLD = f"""\
{LAYERS} transformer layers of width {WIDTH}, {BATCH} x {LENGTH} positions a rank.
At rest: weights and optimizer state between steps. Peak: the most in a step.
Distance: the largest difference of a weight from {OWN}, after {STEPS} steps.
"""


class Used(NamedTuple):
    """What one rank used, in bytes, and its weights after the steps."""

    at_rest: int  # weights and optimizer state, between two steps
    peak: int  # in a step
    weights: list[Tensor]


def net(name: str, count: int) -> nn.Module:
    """A stack of transformer layers and a classifier, sharded where there are several ranks."""
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        for _ in range(LAYERS)
    ]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    if name == "O3":
        model.to(DTYPE)
    if count > 1:
        in_half = name in (OWN, "O2")
        policy = MixedPrecisionPolicy(*((DTYPE, torch.float32) if in_half else ()))
        for part in [*layers, model]:
            fully_shard(part, mp_policy=policy)
    return model


def train(name: str, rank: int, count: int) -> Used:
    """Train under one row of the table."""
    with LiveBytes() as live:
        model = net(name, count)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        level = {**ALONE, **SHARDED}[name]
        if level:
            amp.initialize(model, optimizer, opt_level=level, dtype=DTYPE, verbosity=0)
        at_rest = 0
        for step in range(STEPS):
            live.peak = live.now
            _step(model, optimizer, 100 * rank + step, bool(level))
            optimizer.zero_grad()
            at_rest = live.now
        peak = live.peak
    weights = [p.detach() for p in model.parameters()]
    whole = [w.full_tensor() if hasattr(w, "full_tensor") else w for w in weights]
    amp.deactivate()
    return Used(at_rest, peak, [value.float() for value in whole])


def _step(model: nn.Module, optimizer: Any, number: int, managed: bool) -> None:
    data = torch.Generator().manual_seed(number)
    inputs = torch.randn(BATCH, LENGTH, WIDTH, generator=data)
    targets = torch.randint(0, 10, (BATCH,), generator=data)
    loss = F.cross_entropy(model(inputs).float().mean(1), targets)
    if managed:
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
    else:
        loss.backward()
    optimizer.step()


def work(rank: int, count: int, place: str) -> None:
    """One rank: all rows in turn; rank 0 writes what it found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=count)
    found = {name: train(name, rank, count) for name in (SHARDED if count > 1 else ALONE)}
    if rank == 0:
        torch.save({name: tuple(used) for name, used in found.items()}, f"{place}.found")
    dist.destroy_process_group()


def furthest(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference between two models' weights."""
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def report(options: Namespace) -> Iterator[str]:
    """A row for each number of ranks and each way."""
    rows = []
    for count in [1, *options.ranks]:
        with tempfile.TemporaryDirectory() as folder:
            place = f"{folder}/meet"
            torch.multiprocessing.spawn(work, args=(count, place), nprocs=count)
            found = {name: Used(*used) for name, used in torch.load(f"{place}.found").items()}
        for name, used in found.items():
            apart = f"{furthest(used.weights, found[OWN].weights):.2g}" if OWN in found else ""
            sizes = [f"{used.at_rest / 1e6:.2f}", f"{used.peak / 1e6:.2f}"]
            rows.append([count, name, *sizes, apart])
    yield TOLD
    yield table(["ranks", "", "at rest, MB", "peak, MB", "distance"], rows)
