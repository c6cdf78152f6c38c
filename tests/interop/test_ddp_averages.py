"""Two gloo ranks at O2: DDP averages FP32 gradients."""

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
BF16 = torch.bfloat16


class Net(nn.Module):
    """The second head is used by the first micro-batches only, the third never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Conv2d(2, 16, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(16, track_running_stats=False)
        self.heads = nn.ModuleList([nn.Linear(16, 4) for _ in range(3)])

    def forward(self, x: torch.Tensor, heads: int = 1) -> torch.Tensor:
        hidden = self.norm(self.body(x)).relu().mean((2, 3))
        return sum(head(hidden) for head in self.heads[:heads])


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.Generator().manual_seed(number)
    return torch.randn(8, 2, 5, 5, generator=data), torch.randint(0, 4, (8,), generator=data)


def one_pass(model, optimizer, number: int, heads: int, blocks: bool = True) -> None:
    inputs, targets = batch(number)
    loss = F.cross_entropy(model(inputs, heads).float(), targets) / MICRO
    if blocks:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()


def initialized(blocks: bool = True):
    return small_training.managed(Net(), "O2", loss_scale=256.0 if blocks else 1.0)


def heads_of(part: int, unused: bool) -> int:
    return 3 if not unused else 2 if part < MICRO - 1 else 1


def averaged(rank: int, blocks: bool, option: str) -> list:
    """Gradients of passes in `no_sync` and of the one that DDP averages.

    `option`: DDP's, or a communication hook of the script.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    unused, hook = option == "find_unused_parameters", getattr(default_hooks, option, None)
    model, optimizer = initialized(blocks)
    model = DistributedDataParallel(model, **({option: True} if option and not hook else {}))
    if hook is not None:
        model.register_comm_hook(None, hook)
    for part in range(MICRO):
        with model.no_sync() if part < MICRO - 1 else contextlib.nullcontext():
            one_pass(model, optimizer, 100 * rank + part, heads_of(part, unused), blocks)
    grads = [param.grad for param in model.parameters()]
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model.module)))  # nothing of DDP is in it
    assert all(value.isfinite().all() for value in copied.state_dict().values())
    assert {grad.dtype for grad in grads if grad is not None} == {torch.float32}
    return [None if grad is None else grad.clone() for grad in grads]


def same_passes(blocks: bool, unused: bool) -> list:
    """The same half passes in one process, one by one, averaged in FP64."""
    model, optimizer = initialized(blocks)
    total: list = [None for _ in model.parameters()]
    for rank in range(2):
        for part in range(MICRO):
            optimizer.zero_grad()
            one_pass(model, optimizer, 100 * rank + part, heads_of(part, unused), blocks)
            for index, param in enumerate(model.parameters()):
                if param.grad is not None:
                    grad = param.grad.double() / 2
                    total[index] = grad if total[index] is None else total[index] + grad
    amp.deactivate()
    return total


@pytest.mark.parametrize(
    ("blocks", "option"),
    [
        *((True, ""), (False, ""), (True, "gradient_as_bucket_view")),
        *((True, "find_unused_parameters"), (True, "allreduce_hook"), (True, "fp16_compress_hook")),
    ],
)
def test_micro_batches_and_ranks_add_up_in_float32(ranks, blocks, option):
    first, second = ranks(averaged, blocks, option)
    expected = same_passes(blocks, option == "find_unused_parameters")
    for ours, theirs, exact in zip(first, second, expected, strict=True):
        if exact is None:
            assert ours is theirs is None
            continue
        assert torch.equal(ours, theirs)
        within = 2e-3 if option == "fp16_compress_hook" else 1e-6
        scale = max(float(exact.abs().max()), 1e-6)
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=within * scale)


def sparse(rank: int, level: str) -> list:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(20, 4, sparse=True, mode="sum"), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, dtype=BF16, verbosity=0)
    parallel = DistributedDataParallel(model)
    for step in range(3):
        words = torch.randint(0, 20, (4, 5), generator=torch.Generator().manual_seed(rank + step))
        loss = F.cross_entropy(parallel(words).float(), torch.tensor([0, 1, 2, 0]))
        small_training.step(loss, optimizer)
    return [param.detach().clone() for param in model.parameters()]


def test_sparse_gradients(ranks):
    expected = ranks(sparse, "O0")[0]
    first, second = ranks(sparse, "O2")
    assert all(map(torch.equal, first, second))
    for ours, theirs in zip(first, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.03, rtol=0.03)
