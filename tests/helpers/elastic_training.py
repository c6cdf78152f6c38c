"""A training that torchrun may restart: it goes on from its last checkpoint.

    torchrun --max-restarts 1 elastic_training.py FOLDER LEVEL DTYPE STEPS [DIE_AT HOW]

Rank 0 writes a checkpoint after each step.  Rank 1 dies after step DIE_AT in the first
attempt, by an exception or by `os._exit`.  At the end rank 0 writes FOLDER/result.pt.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ampatch

POISONED = 2  # at this step the last rank's loss is infinite
ROWS = 16  # of all ranks together


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))
    return model, torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)


def managed(level: str, dtype: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same under an opt level, with a loss scale that grows every third step."""
    model, optimizer = build(seed)
    settings = {"loss_scale": "dynamic", "init_scale": 256.0, "growth_interval": 3, "verbosity": 0}
    dtype = getattr(torch, dtype)
    return ampatch.initialize(model, optimizer, opt_level=level, dtype=dtype, **settings)


def one_step(model: nn.Module, optimizer, step: int, rank: int, ranks: int) -> None:
    """A step of this rank's share of the rows; any number of ranks has the same rows."""
    data = torch.Generator().manual_seed(step)
    inputs = torch.randn(ROWS, 6, generator=data)[rank::ranks]
    targets = torch.randint(0, 4, (ROWS,), generator=data)[rank::ranks]
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs).float(), targets)
    if step == POISONED and rank == ranks - 1:
        loss = loss * float("inf")
    with ampatch.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


def state_of(model: nn.Module, optimizer, step: int) -> dict:
    return {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "ampatch": ampatch.state_dict(),
    }


def load(state: dict, model: nn.Module, optimizer) -> int:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    ampatch.load_state_dict(state["ampatch"])
    return state["step"]


def main(folder: str, level: str, dtype: str, steps: str, *death: str) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model, optimizer = managed(level, dtype, seed=100 * attempt + rank)
    place, step = os.path.join(folder, "checkpoint.pt"), 0
    if os.path.exists(place):
        step = load(torch.load(place), model, optimizer)
    # Otherwise DDP's first pass has other buckets than the rest, so that more than two ranks
    # add up in another order; without ampatch as well.
    parallel = DistributedDataParallel(model, find_unused_parameters=ranks > 2)
    while step < int(steps):
        one_step(parallel, optimizer, step, rank, ranks)
        step += 1
        if rank == 0:
            torch.save(state_of(model, optimizer, step), place + ".new")
            os.replace(place + ".new", place)
        if death and attempt == 0 and step == int(death[0]) and rank == 1:
            if death[1] == "exit":
                os._exit(3)
            raise RuntimeError("this rank dies")
    if rank == 0:
        end = state_of(model, optimizer, step) | {"attempt": attempt, "ranks": ranks}
        torch.save(end, os.path.join(folder, "result.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
