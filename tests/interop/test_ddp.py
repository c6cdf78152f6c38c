"""DistributedDataParallel's options, and overflows on one rank only: the ranks stay equal."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ddp_training import batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ampatch as amp

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

OPTIONS = {
    "plain": {},
    "static_graph": {"static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "all but unused": {"static_graph": True, "gradient_as_bucket_view": True},
}


class Net(nn.Module):
    """A body and two heads; the second is not used under `find_unused_parameters`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])

    def forward(self, x: torch.Tensor, heads: int = 2) -> torch.Tensor:
        hidden = self.norm(self.body(x)).relu()
        return sum(head(hidden) for head in self.heads[:heads])


def train(
    rank: int, level: str, options: str, micro: int, poisoned: tuple, dtype, order: str, device: str
) -> dict:
    """Eight steps of `micro` batches, all but the last in `no_sync`.

    A static graph is not traced in `no_sync`, so the first step then does without.
    `poisoned` holds (rank, step, micro-batch) where the loss is infinite.
    """
    heads = 1 if options == "find_unused_parameters" else 2
    model = Net(seed=rank).to(device)  # DDP's broadcast makes the ranks equal
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if order != "first":
        parallel = DistributedDataParallel(model, **OPTIONS[options])
    amp.initialize(
        parallel if order == "wrapper" else model,
        optimizer,
        opt_level=level,
        dtype=dtype,
        init_scale=1024.0,
        growth_interval=3,
        verbosity=0,
    )
    if order == "first":
        parallel = DistributedDataParallel(model, **OPTIONS[options])
    skipped, scales = [], []
    for step in range(8):
        optimizer.zero_grad()
        for part in range(micro):
            inputs, targets = (
                tensor.to(device) for tensor in batch(1000 * rank + 10 * step + part)
            )
            last = part == micro - 1 or (step == 0 and "static_graph" in OPTIONS[options])
            with contextlib.nullcontext() if last else parallel.no_sync():
                loss = F.cross_entropy(parallel(inputs, heads).float(), targets) / micro
                if (rank, step, part) in poisoned:
                    loss = loss * float("inf")
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
        scales.append(amp.loss_scale())
    weights = [value.detach().float().cpu().clone() for value in model.parameters()]
    return {"weights": weights, "skipped": skipped, "scales": scales}


def float_masters(options: str, micro: int, left_out: set[int]) -> list[torch.Tensor]:
    heads = 1 if options == "find_unused_parameters" else 2
    model = Net(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(8):
        optimizer.zero_grad()
        for rank in range(2):
            for part in range(micro):
                inputs, targets = batch(1000 * rank + 10 * step + part)
                (F.cross_entropy(model(inputs, heads), targets) / (2 * micro)).backward()
        if step not in left_out:
            optimizer.step()
    return [param.detach() for param in model.parameters()]


# `initialize` comes first, or is given the wrapper, or what is in a wrapper that is made before.
# Above one micro-batch all but the last are in `no_sync`.
ROWS = [
    *(("O0", "all but unused", "first", 2), ("O3", "all but unused", "first", 2)),
    *(("O1", "plain", "wrapper", 1), ("O1", "static_graph", "first", 3)),
    *(("O1", "find_unused_parameters", "first", 3), ("O2", "plain", "module", 1)),
    *(("O2", "static_graph", "first", 3), ("O2", "find_unused_parameters", "wrapper", 3)),
    *(("O2", "gradient_as_bucket_view", "first", 3), ("O2", "all but unused", "wrapper", 3)),
]
# Both ranks on one GPU, over gloo: NCCL takes one process for each GPU.
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ON_GPU = [
    pytest.param(level, "plain", "first", micro, "cuda", marks=(pytest.mark.gpu, needs_gpu))
    for level in ("O1", "O2")
    for micro in (1, 2, 3)
]


@pytest.mark.parametrize(
    "level, options, order, micro, device", [*((*row, "cpu") for row in ROWS), *ON_GPU]
)
def test_ddp_trains_as_one_process_in_float(ranks, level, options, order, micro, device):
    poisoned = {1: ((1, 3, 0),), 2: (), 3: ((1, 2, 1), (0, 3, 0), (1, 6, 2))}[micro]
    dtype = torch.float16 if poisoned else torch.bfloat16
    first, second = ranks(train, level, options, micro, poisoned, dtype, order, device)
    skipped = {step for _, step, _ in poisoned}
    assert first["skipped"] == second["skipped"] == [step in skipped for step in range(8)]
    assert first["scales"] == second["scales"]
    assert all(map(torch.equal, first["weights"], second["weights"]))
    for ours, theirs in zip(first["weights"], float_masters(options, micro, skipped), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.05)


def heads_in_turn(rank: int, level: str) -> list:
    """Gradients of passes that leave a head unused now and then, under DDP that looks for it."""
    model = Net(seed=0)
    if level == "O1":
        amp.initialize(model, opt_level="O1", dtype=torch.bfloat16, verbosity=0)
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    results = []
    for number, heads in enumerate((2, 2, 2, 1, 2, 1, 1, 2)):
        x, target = batch(2 * number + rank)
        theirs = torch.autocast("cpu", dtype=torch.bfloat16)
        with theirs if level == "autocast" else contextlib.nullcontext():
            out = parallel(x, heads)
        parallel.zero_grad()
        F.cross_entropy(out.float(), target).backward()
        results.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    amp.deactivate()
    return results


def test_weights_that_ddp_finds_unused_now_and_then(ranks):
    expected, actual = ranks(heads_in_turn, "autocast"), ranks(heads_in_turn, "O1")
    for wanted, got in zip(expected, actual, strict=True):
        for step, others in zip(got, wanted, strict=True):
            for ours, other in zip(step, others, strict=True):
                assert ours is other is None or torch.equal(ours, other)
