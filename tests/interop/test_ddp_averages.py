"""Two gloo ranks: DDP averages gradients in FP32 at O2."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import small_training
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ampatch as amp

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

MICRO = 5
BF16, FP16 = torch.bfloat16, torch.float16


class Net(nn.Module):
    """The second head is used by the first micro-batches only, the third never."""

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Conv2d(2, 16, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(16, affine=affine, track_running_stats=False)
        self.heads = nn.ModuleList([nn.Linear(16, 4) for _ in range(3)])

    def forward(self, x: torch.Tensor, heads: int = 1) -> torch.Tensor:
        hidden = self.norm(self.body(x)).relu().mean((2, 3))
        return sum(head(hidden) for head in self.heads[:heads])


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.Generator().manual_seed(number)
    return torch.randn(8, 2, 5, 5, generator=data), torch.randint(0, 4, (8,), generator=data)


def one_pass(model, optimizer, number: int, heads: int, blocks: bool) -> None:
    inputs, targets = batch(number)
    loss = F.cross_entropy(model(inputs, heads).float(), targets) / MICRO
    if blocks:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()


def scale_of(way: dict) -> float:
    return way.get("scale", 256.0 if way.get("blocks", True) else 1.0)


def initialized(level: str, dtype, scale: float, affine: bool = True):
    return small_training.managed(Net(affine), level, dtype, loss_scale=scale)


def managed(level: str, dtype, scale: float, affine: bool = True, **options):
    model, optimizer = initialized(level, dtype, scale, affine)
    return DistributedDataParallel(model, **options), optimizer


def heads_of(part: int, unused: bool) -> int:
    return 3 if not unused else 2 if part < MICRO - 1 else 1


def averaged(rank: int, level: str, dtype, way: dict) -> list:
    """Gradients of passes in `no_sync` and of the one that DDP averages."""
    blocks, unused = way.get("blocks", True), way.get("unused", False)
    options = dict.fromkeys(way.get("options", ()), True)
    model, optimizer = managed(level, dtype, scale_of(way), **options)
    for part in range(MICRO):
        with model.no_sync() if part < MICRO - 1 else contextlib.nullcontext():
            one_pass(model, optimizer, 100 * rank + part, heads_of(part, unused), blocks)
            if way.get("reads"):
                [param.grad for param in model.parameters()]
    grads = [param.grad for param in model.parameters()]
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model.module)))  # nothing of DDP is in it
    assert all(value.isfinite().all() for value in copied.state_dict().values())
    assert {grad.dtype for grad in grads if grad is not None} == {torch.float32}
    return [None if grad is None else grad.clone() for grad in grads]


def same_passes(dtype, way: dict, count: int = MICRO, affine: bool = True) -> list:
    """The same half passes in one process, one by one, averaged in FP64."""
    blocks, unused = way.get("blocks", True), way.get("unused", False)
    model, optimizer = initialized("O2", dtype, scale_of(way), affine)
    total: list = [None for _ in model.parameters()]
    for rank in range(2):
        for part in range(count):
            optimizer.zero_grad()
            one_pass(model, optimizer, 100 * rank + part, heads_of(part, unused), blocks)
            for index, param in enumerate(model.parameters()):
                if param.grad is not None:
                    grad = param.grad.double() / 2
                    total[index] = grad if total[index] is None else total[index] + grad
    amp.deactivate()
    return total


WAYS = {
    "blocks": {},
    "plain passes": {"blocks": False},
    "reads between passes": {"blocks": False, "reads": True},
    "reads, and a loss scale that no pass uses": {"blocks": False, "reads": True, "scale": 256.0},
    "views": {"options": ("gradient_as_bucket_view",)},
    "unused": {"options": ("find_unused_parameters",), "unused": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=pytest.mark.slow)])
def test_micro_batches_and_ranks_add_up_in_float32(ranks, way, dtype):
    way = WAYS[way]
    one, two = ranks(averaged, "O2", dtype, way)
    for ours, theirs, exact in zip(one, two, same_passes(dtype, way), strict=True):
        if exact is None:
            assert ours is theirs is None
            continue
        assert torch.equal(ours, theirs)
        scale = float(exact.abs().max())
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-6 * max(scale, 1e-6))


def used_before_only(rank: int) -> list:
    """The second head is used by one pass; DDP has averaged it when two more passes come."""
    model, optimizer = managed("O2", BF16, 256.0, find_unused_parameters=True)
    one_pass(model, optimizer, rank, 2, True)
    averaged = [p.grad.clone() for p in model.module.heads[1].parameters()]
    with model.no_sync():
        one_pass(model, optimizer, 10 + rank, 1, True)
    one_pass(model, optimizer, 20 + rank, 1, True)
    now = [p.grad.clone() for p in model.module.heads[1].parameters()]
    return [torch.equal(before, after) for before, after in zip(averaged, now, strict=True)]


def test_what_later_passes_do_not_use_stays(ranks):
    """DDP writes nothing into a weight that no rank has used since the last average."""
    assert ranks(used_before_only) == [[True, True]] * 2


HOOKS = ["allreduce_hook", "fp16_compress_hook", "powerSGD_hook", "built-in"]


def with_a_hook(rank: int, name: str, level: str) -> dict:
    """Three steps under a communication hook of the script.

    PowerSGD gets one bucket, of one dtype: with two it waits for itself in gloo's two threads.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    model, optimizer = managed(level, BF16, 256.0, affine=name != "powerSGD_hook")
    if name == "built-in":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    elif name == "powerSGD_hook":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        model.register_comm_hook(None, getattr(default_hooks, name))
    grads = None
    for step in range(3):
        optimizer.zero_grad()
        one_pass(model, optimizer, 100 * rank + step, 3, True)
        grads = grads or [p.grad.float().clone() for p in amp.master_params(optimizer)]
        optimizer.step()
    return {"grads": grads, "weights": [p.detach().clone() for p in model.parameters()]}


@pytest.mark.parametrize(
    "name", [HOOKS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in HOOKS[1:])]
)
def test_a_hook_of_the_script_decides(ranks, name):
    one, two = ranks(with_a_hook, name, "O2")
    assert all(map(torch.equal, one["weights"], two["weights"]))
    exact = same_passes(BF16, {}, count=1, affine=name != "powerSGD_hook")
    for ours, theirs in zip(one["grads"], exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0.05, atol=2e-3)


def changed_inside(rank: int) -> list:
    """What code inside a block does to averaged gradients counts."""
    model, optimizer = managed("O2", BF16, 256.0)
    inputs, targets = batch(rank)
    with amp.scale_loss(F.cross_entropy(model(inputs, 3).float(), targets), optimizer) as scaled:
        scaled.backward()
        model.module.heads[0].weight.grad.mul_(0.5)
        model.module.heads[1].weight.grad = None
    one, two, three = (head.weight.grad for head in model.module.heads)
    return [torch.equal(one, three * 0.5), two is None, three.abs().sum() > 0]


def test_changes_inside_a_block_count(ranks):
    assert ranks(changed_inside) == [[True, True, True]] * 2


def sparse(rank: int, level: str) -> list:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(20, 4, sparse=True, mode="sum"), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if level != "FP32":
        amp.initialize(model, optimizer, opt_level=level, dtype=BF16, verbosity=0)
    parallel = DistributedDataParallel(model)
    for step in range(3):
        optimizer.zero_grad()
        words = torch.randint(0, 20, (4, 5), generator=torch.Generator().manual_seed(rank + step))
        loss = F.cross_entropy(parallel(words).float(), torch.tensor([0, 1, 2, 0]))
        if level == "FP32":
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
    return [param.detach().float().clone() for param in model.parameters()]


def test_sparse_gradients(ranks):
    expected = ranks(sparse, "FP32")[0]
    one, two = ranks(sparse, "O2")
    assert all(map(torch.equal, one, two))
    for ours, theirs in zip(one, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.03, rtol=0.03)
