"""Two gloo ranks on the CPU: DistributedDataParallel and a shared overflow flag."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ampatch as amp

RANKS = 2

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.Generator().manual_seed(number)
    return torch.randn(8, 6, generator=data), torch.randint(0, 3, (8,), generator=data)


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, number: int,
             poison: bool = False, weight: float = 1.0) -> None:
    inputs, targets = batch(number)
    loss = F.cross_entropy(model(inputs), targets) * weight
    with amp.scale_loss(loss * (float("inf") if poison else 1.0), optimizer) as scaled_loss:
        scaled_loss.backward()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Weights as the model has them, and what the optimizer updates."""
    values = [*model.parameters(), *amp.master_params(optimizer)]
    return [value.detach().float().clone() for value in values]


def train_under_ddp(rank: int, level: str) -> dict:
    """Steps with different data per rank; rank 1 overflows in the third, if anybody looks."""
    overflows = rank == 1 and level != "O3"  # O3's scale is static
    model, optimizer = build(seed=rank)  # DDP's broadcast makes the ranks equal
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    parallel = DistributedDataParallel(model)
    skipped = []
    for number in range(5):
        optimizer.zero_grad()
        backward(parallel, optimizer, 10 * rank + number, poison=overflows and number == 2)
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
    return {"weights": everything(model, optimizer), "skipped": skipped, "scale": amp.loss_scale()}


def accumulate_under_ddp(rank: int, level: str) -> dict:
    """Two micro-batches, the first within `no_sync`."""
    model, optimizer = build(seed=0)
    amp.initialize(model, optimizer, opt_level=level, dtype=torch.bfloat16, verbosity=0,
                   loss_scale=128.0)
    parallel = DistributedDataParallel(model)
    with parallel.no_sync():
        backward(parallel, optimizer, rank, weight=0.5)
    backward(parallel, optimizer, 10 + rank, weight=0.5)
    return {"grads": [param.grad.clone() for param in amp.master_params(optimizer)]}


def sharing_the_flag(rank: int, level: str) -> dict:
    """Gradients that no DDP reduces; only the flag is shared, through `process_group`."""
    model, optimizer = build(seed=0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, process_group=dist.group.WORLD)
    skipped = []
    for number in range(3):
        optimizer.zero_grad()
        backward(model, optimizer, number, poison=rank == 1 and number == 1)
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
    return {"weights": everything(model, optimizer), "skipped": skipped, "scale": amp.loss_scale()}


def wrapped_too_early(rank: int, level: str) -> dict:
    model, _ = build(seed=0)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    try:
        amp.initialize(parallel, optimizer, opt_level=level, verbosity=0)
    except amp.AmpatchError as error:
        return {"error": str(error)}
    backward(parallel, optimizer, rank)
    optimizer.step()
    return {"error": None, "weights": everything(model, optimizer)}


def _rank(rank: int, work: Callable, level: str, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank),
                      WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.save(work(rank, level), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def on_two_ranks(work: Callable, level: str) -> list[dict]:
    """What `work(rank, level)` returned on each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (work, level, port, folder), nprocs=RANKS)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_ranks_agree_bit_by_bit_after_an_overflow_on_one(level):
    one, two = on_two_ranks(train_under_ddp, level)
    assert all(map(torch.equal, one["weights"], two["weights"]))
    assert one["scale"] == two["scale"] and one["skipped"] == two["skipped"]
    assert one["skipped"] == [False, False, level != "O3", False, False]
    assert all(bool(value.isfinite().all()) for value in one["weights"])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_accumulation_with_no_sync_equals_one_big_batch(level):
    one, two = on_two_ranks(accumulate_under_ddp, level)
    model, _ = build(seed=0)
    for number in (0, 1, 10, 11):
        inputs, targets = batch(number)
        (F.cross_entropy(model(inputs), targets) / 4).backward()
    for rank in (one, two):
        for grad, parameter in zip(rank["grads"], model.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad, atol=3e-3, rtol=0.05)
    assert all(map(torch.equal, one["grads"], two["grads"]))


def test_a_shared_flag_skips_the_step_on_both_ranks():
    one, two = on_two_ranks(sharing_the_flag, "O1")
    assert one["skipped"] == two["skipped"] == [False, True, False]
    assert one["scale"] == two["scale"] == 2.0**15
    assert all(map(torch.equal, one["weights"], two["weights"]))


def test_ddp_before_initialize_is_refused_where_it_would_drift():
    for rank in on_two_ranks(wrapped_too_early, "O2"):
        assert "already wrapped in DistributedDataParallel" in rank["error"]
    one, two = on_two_ranks(wrapped_too_early, "O1")
    assert one["error"] is two["error"] is None
    assert all(map(torch.equal, one["weights"], two["weights"]))
