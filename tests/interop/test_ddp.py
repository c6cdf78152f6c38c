"""DistributedDataParallel: its options, averages, `join`, and overflows on one rank only."""

import contextlib
import copy
import pickle

import pytest
import small_training
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ddp_training import batch, build
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


MICRO = 5
BF16 = torch.bfloat16


class Branches(nn.Module):
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


def images(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.Generator().manual_seed(number)
    return torch.randn(8, 2, 5, 5, generator=data), torch.randint(0, 4, (8,), generator=data)


def one_pass(model, optimizer, number: int, heads: int, blocks: bool = True) -> None:
    inputs, targets = images(number)
    loss = F.cross_entropy(model(inputs, heads).float(), targets) / MICRO
    if blocks:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()


def initialized(blocks: bool = True):
    return small_training.managed(Branches(), "O2", loss_scale=256.0 if blocks else 1.0)


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


BATCHES = (3, 6)  # of each rank: the first runs out of data


def joining(model, optimizer, settings: dict):
    from torch.distributed.algorithms.join import Join

    if settings.get("zero"):
        return Join([model, optimizer])
    return model.join(divide_by_initial_world_size=settings.get("static_divisor", True))


def optimizer_of(model, settings: dict):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if settings.get("zero"):
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model, number: int) -> torch.Tensor:
    inputs, targets = batch(number)
    return F.cross_entropy(model(inputs).float(), targets)


def uneven(rank: int, level: str, dtype, settings: dict) -> list[torch.Tensor]:
    """The weights after each of two epochs.  "FP32" is plain torch."""
    model, is_plain = build(seed=0)[0], level == "FP32"
    optimizer = optimizer_of(model, settings)
    parallel = DistributedDataParallel(model) if settings.get("wrapped first") else model
    if not is_plain:
        options = {"loss_scale": 1.0 if level == "O0" else 256.0, "verbosity": 0}
        amp.initialize(parallel, optimizer, opt_level=level, dtype=dtype, **options)
    if not settings.get("wrapped first"):
        parallel = DistributedDataParallel(model)
    micro = settings.get("micro", 1)
    weights = []
    for epoch in range(2):
        with joining(parallel, optimizer, settings):
            for step in range(BATCHES[rank]):
                optimizer.zero_grad()
                for part in range(micro):
                    last = part == micro - 1
                    with contextlib.nullcontext() if last else parallel.no_sync():
                        loss = loss_of(parallel, 1000 * rank + 100 * epoch + 10 * step + part)
                        loss = loss / micro
                        if is_plain:
                            loss.backward()
                            continue
                        small_training.pass_back(loss, optimizer)
                optimizer.step()
        weights += [p.detach().float().clone() for p in model.parameters()]
    amp.deactivate()
    return weights


HERE = [  # in the default run; what the others could break is in these
    ("O2", torch.float16, {"wrapped first": True}),
    ("O1", torch.float16, {"zero": True}),
]
CASES = [
    ("O1", torch.float16, {"micro": 2}),
    ("O2", torch.bfloat16, {"static_divisor": False, "micro": 2}),
    ("O3", torch.bfloat16, {}),
    ("O2", torch.float16, {"zero": True}),
]


@pytest.mark.parametrize(
    "level, dtype, settings",
    [*HERE, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)],
)
def test_a_rank_without_data_follows_the_others(ranks, level, dtype, settings):
    first, second = ranks(uneven, level, dtype, settings)
    assert all(map(torch.equal, first, second))
    wide = 0.1 if level == "O3" else 0.03
    for ours, theirs in zip(first, ranks(uneven, "FP32", dtype, settings)[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=wide, rtol=wide)


def joined(rank: int, settings: dict, with_zero: bool = False) -> str:
    from torch.distributed.algorithms.join import Join

    model = build(seed=0)[0]
    optimizer = optimizer_of(model, {"zero": with_zero})
    if settings.pop("process_group", None):
        settings["process_group"] = dist.group.WORLD
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, **settings)
    try:
        with Join([optimizer]) if with_zero else DistributedDataParallel(model).join():
            if with_zero:
                small_training.step(loss_of(model, 0), optimizer)
    except amp.AmpatchError as error:
        return str(error)
    return "taken"


def test_what_join_cannot_shadow_is_refused(ranks):
    for settings in ({}, {"loss_scale": 8.0, "process_group": True}):
        for error in ranks(joined, settings):
            assert "Expected a static scale and no process_group" in error
    assert ranks(joined, {"loss_scale": 8.0}) == ["taken", "taken"]
    for error in ranks(joined, {}, True):
        assert "in Join([...]) under a dynamic loss scale" in error
