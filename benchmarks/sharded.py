"""Memory of each rank under FSDP2, and distance of the weights from those of FSDP2's own policy.

    python benchmarks/sharded.py [--ranks 2 4] [--out FILE.md]

Gloo processes on the CPU, bfloat16, AdamW.  Bytes are counted, not sampled: a dispatch mode knows
every storage that an operator returned, and adds up the sizes of those that are alive after each
operator.  FSDP2 frees what it has gathered by making a storage empty, so sizes are asked each time.
"""

from __future__ import annotations

import argparse
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from workers import machine

import ampatch as amp

DTYPE = torch.bfloat16
OWN = "FSDP2's own policy"
ALONE = {"FP32, no shards": "", "O2, no shards": "O2"}
SHARDED = {"FSDP2, FP32": "", OWN: "", "O1": "O1", "O2": "O2", "O3": "O3"}
STEPS = 4
WIDTH, LAYERS, BATCH, LENGTH = 256, 6, 4, 32


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators made while it is on; `peak` is the most since set."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            if isinstance(value, Tensor):
                local = value.to_local() if hasattr(value, "to_local") else value
                storage = local.untyped_storage()
                self._storages[id(storage)] = weakref.ref(storage)
        self.peak = max(self.peak, self.now())
        return output

    def now(self) -> int:
        """What is alive."""
        alive = {key: one for key, ref in self._storages.items() if (one := ref()) is not None}
        self._storages = {key: self._storages[key] for key in alive}
        places = {one.data_ptr(): one.nbytes() for one in alive.values() if one.nbytes()}
        return sum(places.values())


class Used(NamedTuple):
    """What one rank used, in bytes, and its weights after the steps."""

    at_rest: int  # weights and optimizer state, between two steps
    peak: int  # in a step
    weights: list[Tensor]


def net() -> nn.Module:
    """A stack of transformer layers and a classifier."""
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        for _ in range(LAYERS)
    ]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def train(name: str, rank: int, count: int) -> Used:
    """Train under one row of the table."""
    with LiveBytes() as live:
        model = net()
        if count > 1:
            policy = MixedPrecisionPolicy(DTYPE, torch.float32 if name == OWN else None)
            given = policy if name == OWN else MixedPrecisionPolicy()
            for layer in model[:-1]:
                fully_shard(layer, mp_policy=given)
            fully_shard(model, mp_policy=given)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        level = {**ALONE, **SHARDED}[name]
        if level:
            amp.initialize(model, optimizer, opt_level=level, dtype=DTYPE, verbosity=0)
        at_rest = 0
        for step in range(STEPS):
            live.peak = live.now()
            _step(model, optimizer, 100 * rank + step, bool(level))
            optimizer.zero_grad()
            at_rest = live.now()
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


def measure(count: int) -> dict[str, Used]:
    """What rank 0 of `count` ranks used, by row."""
    with tempfile.TemporaryDirectory() as folder:
        place = f"{folder}/meet"
        torch.multiprocessing.spawn(work, args=(count, place), nprocs=count)
        found = torch.load(f"{place}.found", weights_only=False)
    return {name: Used(*used) for name, used in found.items()}


def furthest(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference between two models' weights."""
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def report(ranks: list[int]) -> str:
    """The table, in markdown."""
    lines = [
        f"Memory of one rank under FSDP2, {DTYPE}, AdamW, gloo on the CPU, counted.",
        machine(),
        "",
        f"{LAYERS} transformer layers of width {WIDTH}, {BATCH} x {LENGTH} positions a rank.",
        "At rest: weights and optimizer state between steps. Peak: the most in a step.",
        f"Distance: the largest difference of a weight from {OWN}, after {STEPS} steps.",
        "",
        "| ranks | | at rest, MB | peak, MB | distance |",
        "|---|---|---|---|---|",
    ]
    for count in [1, *ranks]:
        found = measure(count)
        for name, used in found.items():
            apart = f"{furthest(used.weights, found[OWN].weights):.2g}" if OWN in found else ""
            sizes = f"{used.at_rest / 1e6:.2f} | {used.peak / 1e6:.2f}"
            lines.append(f"| {count} | {name} | {sizes} | {apart} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    chosen = parser.parse_args()
    text = report(chosen.ranks)
    print(text)
    if chosen.out is not None:
        chosen.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
