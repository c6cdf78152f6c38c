"""Two gloo ranks on the CPU: averages by hand, a shared overflow flag, ZeroRedundancyOptimizer.

Each beside the same training in one process, and restarts from a checkpoint, also with a plain
optimizer.  Trainings in DDP, and overflows in them, are in `tests/interop/test_ddp.py`.
"""

import contextlib
import io
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ddp_training import backward, batch, build, everything
from ranks import slow
from sharded_training import loss_of
from small_training import pass_back
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ampatch as amp
from ampatch.session.facade import with_apex_tables

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

DYNAMIC = {"loss_scale": "dynamic", "init_scale": 64.0, "verbosity": 0}


class Watch:
    def __init__(self, model, *optimizers) -> None:
        self.model, self.optimizers = model, optimizers
        self.seen: dict = {"skipped": [], "moved": [], "scales": []}

    def step(self) -> None:
        before = everything(self.model, self.optimizers[0])
        for optimizer in self.optimizers:
            optimizer.step()
        after = self.seen["weights"] = everything(self.model, self.optimizers[0])
        scale = amp.state_dict()["loss_scaler0"]
        self.seen["skipped"].append(
            [amp.step_was_skipped(optimizer) for optimizer in self.optimizers]
        )
        self.seen["moved"].append(not all(map(torch.equal, before, after)))
        self.seen["scales"].append((scale["loss_scale"], scale["unskipped"]))
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def assert_equal_and_finite(first: dict, second: dict) -> None:
    assert all(map(torch.equal, first["weights"], second["weights"]))
    assert all(bool(value.isfinite().all()) for value in first["weights"])
    assert first["scales"] == second["scales"] and first["skipped"] == second["skipped"]


# DistributedDataParallel


def accumulate_under_ddp(rank: int, level: str) -> list[torch.Tensor]:
    """Two micro-batches, the first within `no_sync`; a second optimizer shares a layer."""
    model, optimizer = build(seed=0)
    optimizers = [optimizer, torch.optim.SGD(model[2].parameters(), lr=0.1)]
    amp.initialize(model, optimizers, opt_level=level, verbosity=0, loss_scale=128.0)
    parallel = DistributedDataParallel(model)
    with parallel.no_sync():
        backward(parallel, optimizers, rank, weight=0.5)
    backward(parallel, optimizers, 10 + rank, weight=0.5)
    return [param.grad.float() for param in model.parameters()]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_accumulation_with_no_sync_equals_one_big_batch(ranks, level):
    first, second = ranks(accumulate_under_ddp, level)
    model, _ = build(seed=0)
    for inputs, targets in map(batch, (0, 1, 10, 11)):
        (F.cross_entropy(model(inputs), targets) / 4).backward()
    for grad, param in zip(first, model.parameters(), strict=True):
        torch.testing.assert_close(grad, param.grad, atol=3e-3, rtol=0.05)
    assert all(map(torch.equal, first, second))


def kept_loss(rank: int) -> None:
    model, optimizer = build(seed=0)
    loss = model(batch(0)[0]).sum()
    with pytest.raises(amp.AmpatchError, match="or a loss of it is still alive"):
        amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    assert "step" not in vars(optimizer) and model(batch(0)[0]).dtype is torch.float32
    del loss
    amp.initialize(model, optimizer, opt_level="O3", verbosity=0)


def test_a_loss_that_is_kept_is_refused_as_ddp_is(ranks):
    """Both hold the nodes that add to gradients; the message names both."""
    ranks(kept_loss)


LEVELS = [("", "O3"), ("O0", "O2"), ("O2", "O1"), ("O1", "O3")]
LEVELS += [("O3", then) for then in ("O0", "O1", "O2", "O3")]


def other_levels(rank: int) -> list[dict]:
    """A model in DDP gets another level; "": its first one."""
    results = []
    for first, then in LEVELS:
        model, optimizer = build(seed=0)
        settings = {"dtype": torch.bfloat16, "verbosity": 0}
        if first:
            amp.initialize(model, optimizer, opt_level=first, **settings)
        parallel, error = DistributedDataParallel(model), ""
        for number in range(4):
            if number == 1 or not first:
                try:
                    amp.initialize(model, optimizer, opt_level=then, **settings)
                except amp.AmpatchError as refusal:
                    error = str(refusal)
            if first:
                optimizer.zero_grad()
                backward(parallel, optimizer, 10 * rank + number)
                optimizer.step()
        weights = [p.detach().clone() for p in model.parameters()]
        results.append({"error": error, "weights": weights})
        amp.deactivate()
    return results


def test_another_level_inside_ddp_changes_no_dtype(ranks):
    """DDP would not average gradients of parameters that have another dtype than at first."""
    for levels, first, second in zip(LEVELS, *ranks(other_levels), strict=True):
        assert all(map(torch.equal, first["weights"], second["weights"])), levels
        is_refused = "already wrapped in DistributedDataParallel" in first["error"]
        assert is_refused == bool(first["error"]) == ("O3" in levels), levels


def failing_block(rank: int, level: str, accumulated: bool) -> dict:
    """Rank 1 raises in its block, after the backward pass; both then drop the batch."""
    model, optimizer = build(seed=0)
    amp.initialize(model, optimizer, opt_level=level, **DYNAMIC)
    parallel, watch = DistributedDataParallel(model), Watch(model, optimizer)
    backward(parallel, optimizer, rank)
    watch.step()
    if accumulated:
        backward(parallel, optimizer, 10 + rank)
    caught = False
    try:
        inputs, targets = batch(20 + rank)
        with amp.scale_loss(F.cross_entropy(parallel(inputs), targets), optimizer) as scaled_loss:
            scaled_loss.backward()
            if rank == 1:
                raise ValueError("bad batch")
    except ValueError:
        caught = True
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()  # unscales what waits
    optimizer.zero_grad()
    for number in range(30, 34):
        backward(parallel, optimizer, number + 100 * rank)
        watch.step()
    return watch.seen | {"caught": caught, "norm": norm}


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("level", ["O1", "O3"])  # gradients in FP32, and in half
def test_an_exception_on_one_rank_leaves_the_ranks_equal(ranks, level, accumulated):
    first, second = ranks(failing_block, level, accumulated)
    assert (first["caught"], second["caught"]) == (False, True)
    assert_equal_and_finite(first, second)
    assert second["norm"] < 10 * max(first["norm"], 0.1)  # nothing scaled is left behind


# Averages by hand: an overflow reaches the other rank after the block


def averaging(rank: int, case: dict) -> dict:
    """Rank 1 overflows in the last layer in the second of four steps, in its block or after it.

    Its gradients reach rank 0 after the block.  There are one or two optimizers, in one or two
    blocks.
    """
    case = {"optimizers": 1, "blocks": 1, "inside": True, "clip": "", "as_apex": False, **case}
    model, _ = build(seed=0)
    pair = [torch.optim.SGD(model[index].parameters(), lr=0.1) for index in (0, 2)]
    pair = pair if case["optimizers"] == 2 else [torch.optim.AdamW(model.parameters(), lr=0.01)]
    with with_apex_tables() if case["as_apex"] else contextlib.nullcontext():
        amp.initialize(model, pair, opt_level="O2", **DYNAMIC)
    watch = Watch(model, *pair)
    for number in range(4):
        overflows = (rank, number) == (1, 1)
        for group in [[optimizer] for optimizer in pair] if case["blocks"] == 2 else [pair]:
            inputs, targets = batch(10 * rank + number)
            params = [p for optimizer in group for p in optimizer.param_groups[0]["params"]]
            with amp.scale_loss(F.cross_entropy(model(inputs), targets), group) as scaled_loss:
                scaled_loss.backward(inputs=params)
                if overflows and case["inside"] and group[-1] is pair[-1]:
                    model[2].bias.grad[0] = float("inf")
        if overflows and not case["inside"]:
            model[2].bias.grad[0] = float("inf")
        for param in model.parameters():  # by hand, as tutorials do it
            dist.all_reduce(param.grad.data)
            param.grad.data /= dist.get_world_size()
        if case["clip"] == "value":  # an inf among the gradients is not to be seen afterwards
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
        if case["clip"] == "norm":
            nn.utils.clip_grad_norm_(amp.master_params(pair[0]), 1.0)
        watch.step()
    return watch.seen


TWO = {"optimizers": 2}


@pytest.mark.parametrize(
    "case, skips",
    [
        *(({"clip": clip}, [True]) for clip in ("", "value", "norm")),
        *(({**TWO, "inside": inside}, [False, True]) for inside in (True, False)),
        *(({**TWO, "inside": inside, "as_apex": True}, [True, True]) for inside in (True, False)),
        ({**TWO, "blocks": 2}, [False, True]),
    ],
    ids=str,
)
def test_an_overflow_that_reaches_other_ranks_after_the_block_skips_their_steps(ranks, case, skips):
    """Both ranks skip the same steps, and the scale moves once for each block on each."""
    first, second = ranks(averaging, case)
    assert_equal_and_finite(first, second)
    none, blocks = [False] * len(skips), case.get("blocks", 1)
    assert first["skipped"] == [none, skips, none, none]
    assert first["moved"] == second["moved"] == [True, not all(skips), True, True]
    assert first["scales"] == [(64.0, blocks), (32.0, 0), (32.0, blocks), (32.0, 2 * blocks)]


# `process_group`: gradients of their own, one flag


def sharing_the_flag(rank: int) -> dict:
    """Each rank trains on data of its own; the delayed unscaling shares the flag too."""
    model, optimizer = build(seed=0)
    group = {"process_group": dist.group.WORLD}
    amp.initialize(model, optimizer, opt_level="O2", **DYNAMIC, **group)
    watch = Watch(model, optimizer)
    for number in range(4):
        inputs, targets = batch(10 * rank + number)
        bad = rank == number - 1  # rank 0 in the second step, rank 1 in the third
        loss = F.cross_entropy(model(inputs), targets) * (float("nan") if bad else 1.0)
        with amp.scale_loss(loss, optimizer, delay_unscale=number > 1) as scaled_loss:
            scaled_loss.backward()
        watch.step()
    return watch.seen


def test_a_shared_flag_skips_the_step_on_both_ranks(ranks):
    first, second = ranks(sharing_the_flag)
    for rank in (first, second):
        assert rank["skipped"] == [[False], [True], [True], [False]]
        assert rank["moved"] == [True, False, False, True]
        assert rank["scales"][-1] == (16.0, 1)
    assert not all(map(torch.equal, first["weights"], second["weights"]))


BF16, FP16 = torch.bfloat16, torch.float16
STEPS = 6
ADAM = ("exp_avg", "exp_avg_sq", "step")
KINDS = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "eps": 1e-4}),
}


class Net(nn.Module):
    """With a norm layer, which stays FP32 at O2."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)).relu())


def groups(model: nn.Module, count: int) -> list:
    if count == 1:
        return list(model.parameters())
    return [
        {"params": list(model.body.parameters()), "lr": 0.02},
        {"params": [*model.norm.parameters(), *model.head.parameters()]},
    ]


def zero(params, kind: str, **options):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer, settings = KINDS[kind]
    return ZeroRedundancyOptimizer(params, optimizer, **settings, **options)


def managed(level, dtype, kind, order="before", count=1, views=False, plain=False, **of_steps):
    """The model in DDP, which wraps it before `initialize` or after, and its optimizer."""
    model = Net()
    make, own = KINDS[kind]
    settings = {"opt_level": level, "dtype": dtype, "init_scale": 1024.0, "verbosity": 0}
    settings["growth_interval"] = 3
    if level != "O0":
        settings["loss_scale"] = "dynamic"
    if order == "after":
        amp.initialize(model, **settings)
        parallel = DistributedDataParallel(model)
        optimizer = zero(groups(model, count), kind, parameters_as_bucket_view=views)
        amp.add_optimizers(optimizer)
        return parallel, optimizer
    if plain:
        optimizer = make(groups(model, count), **own)
    else:
        optimizer = zero(groups(model, count), kind, parameters_as_bucket_view=views)
    amp.initialize(model, optimizer, **settings)
    return DistributedDataParallel(model), optimizer


def one_step(model, optimizer, rank: int, step: int, micro=1, clip=None, bad=False, **_) -> None:
    optimizer.zero_grad()
    for part in range(micro):
        with contextlib.nullcontext() if part == micro - 1 else model.no_sync():
            loss = loss_of(model, 1000 * rank + 10 * step + part) / micro
            with amp.scale_loss(loss * float("inf") if bad else loss, optimizer) as scaled:
                scaled.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), clip)
    optimizer.step()


def values(model) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.parameters()]


def train(rank: int, level: str, dtype, kind: str, options: dict, poisoned: tuple = ()) -> dict:
    model, optimizer = managed(level, dtype, kind, **options)
    results = {"skipped": [], "scales": []}
    for step in range(STEPS):
        one_step(model, optimizer, rank, step, bad=(rank, step) in poisoned, **options)
        results["skipped"].append(amp.step_was_skipped(optimizer))
        results["scales"].append(amp.loss_scale())
    state = [value for entry in optimizer.optim.state.values() for value in entry.values()]
    results["sizes"] = sum(v.numel() for v in state if torch.is_tensor(v) and v.dim())
    results["state"] = [value.clone() for value in model.module.state_dict().values()]
    amp.deactivate()
    return results | {"after": values(model)}


def check(results: list[dict], level: str, dtype, kind: str, options: dict, left_out=()) -> None:
    """Ranks are equal, and near the same in FP32 in one process."""
    model, ranks, micro = Net(), len(results), options.get("micro", 1)
    make, settings = KINDS[kind]
    optimizer = make(groups(model, options.get("count", 1)), **settings)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank, part in itertools.product(range(ranks), range(micro)):
            (loss_of(model, 1000 * rank + 10 * step + part) / (ranks * micro)).backward()
        if "clip" in options:
            nn.utils.clip_grad_norm_(model.parameters(), options["clip"])
        if step not in left_out:
            optimizer.step()
    first = results[0]
    for other in results:
        assert other["skipped"] == [step in left_out for step in range(STEPS)]
        assert other["scales"] == first["scales"]
        for name in ("after", "state"):
            assert all(map(torch.equal, first[name], other[name])), name
        kept = dtype if level == "O3" else torch.float32
        assert {value.dtype for value in other["state"]} <= {kept, torch.float32}
    wide = 0.1 if level == "O3" else 0.03 if dtype is torch.bfloat16 else 0.01
    for ours, theirs in zip(first["after"], model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=wide, rtol=wide)


CASES = [
    ("O0", FP16, "Adam", {}),
    ("O1", FP16, "Adam", {"count": 2, "micro": 2, "clip": 0.1}),
    ("O1", BF16, "SGD", {"order": "after", "views": True}),
    ("O2", FP16, "Adam", {}),
    ("O2", BF16, "SGD", {"order": "after", "count": 2}),
    ("O2", FP16, "SGD", {"order": "after", "micro": 2, "clip": 0.1}),
    ("O2", BF16, "Adam", {"views": True, "count": 2, "micro": 2, "clip": 0.1}),
    ("O3", BF16, "SGD", {"views": True}),
    ("O3", FP16, "SGD", {"order": "after", "count": 2, "micro": 2}),
]
HERE = [CASES[1], CASES[5], CASES[6]]


@pytest.mark.parametrize(
    "level, dtype, kind, options", [case if case in HERE else slow(*case) for case in CASES]
)
def test_it_trains_as_one_process_in_float(ranks, level, dtype, kind, options):
    results = ranks(train, level, dtype, kind, options)
    check(results, level, dtype, kind, options)
    # half of the optimizer's state on each rank, within a weight
    both = [result["sizes"] for result in results]
    assert max(both) < 0.7 * sum(both)


@pytest.mark.parametrize("level", [slow("O1"), "O2", slow("O3")])
def test_an_overflow_on_one_rank(ranks, level):
    results = ranks(train, level, FP16, "SGD", {}, ((0, 1), (1, 3)))
    check(results, level, FP16, "SGD", {}, {1, 3})


def saved(optimizer, model, rank: int) -> bytes | None:
    if hasattr(optimizer, "consolidate_state_dict"):
        optimizer.consolidate_state_dict(to=0)
    return packed(model.module, optimizer) if rank == 0 else None


def packed(model, optimizer) -> bytes:
    file = io.BytesIO()
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**parts, "amp": amp.state_dict()}, file)
    return file.getvalue()


def load(kept: bytes, model, optimizer) -> None:
    parts = torch.load(io.BytesIO(kept))
    getattr(model, "module", model).load_state_dict(parts["model"])
    optimizer.load_state_dict(parts["optimizer"])
    amp.load_state_dict(parts["amp"])


def resume(rank: int, level: str, dtype, order: str, views: bool, plain: bool) -> list:
    """Six steps; three, a checkpoint, a new model and optimizer, three more; the checkpoint."""
    begun = (level, dtype, "Adam", order, 2, views, plain)
    results, sent = [], [None]
    for interrupted in (False, True):
        model, optimizer = managed(*begun)
        for step in range(STEPS):
            if interrupted and step == STEPS // 2:
                sent = [saved(optimizer, model, rank)]
                dist.broadcast_object_list(sent)
                amp.deactivate()
                model, optimizer = managed(*begun)
                load(sent[0], model, optimizer)
            one_step(model, optimizer, rank, step, clip=0.1, bad=(rank, step) == (1, 1))
        inner = getattr(optimizer, "optim", optimizer)
        own = [param for group in inner.param_groups for param in group["params"]]
        states = [inner.state[param][name] for param in own for name in ADAM]
        scale = torch.tensor(list(amp.state_dict()["loss_scaler0"].values()))
        results.append([*values(model), *states, scale])
        amp.deactivate()
    return [*results, sent[0]]


@pytest.mark.parametrize(
    "level, dtype, order, views, plain",
    [
        slow("O1", FP16, "before", True, False),
        slow("O2", FP16, "before", False, False),
        ("O2", BF16, "after", False, False),
        slow("O3", BF16, "before", False, False),
        slow("O1", FP16, "before", False, True),
        ("O2", FP16, "before", False, True),
        slow("O3", BF16, "before", False, True),
    ],
)
def test_a_resumed_run_is_the_same_bit_for_bit(ranks, level, dtype, order, views, plain):
    for at_once, resumed, _ in ranks(resume, level, dtype, order, views, plain):
        assert len(at_once) == len(resumed)
        assert all(map(torch.equal, at_once, resumed))


def tensors_in(checkpoint: bytes) -> list[torch.Tensor]:
    """Weights, the optimizer's state in the order of parameters, and the loss scale."""
    parts = torch.load(io.BytesIO(checkpoint))
    state = parts["optimizer"]["state"]
    moments = [state[index][name] for index in sorted(state) for name in ADAM]
    scale = parts["amp"]["loss_scaler0"].values()
    return [*parts["model"].values(), *moments, torch.tensor(list(scale))]


@pytest.mark.parametrize("plain", [False, True])
def test_a_checkpoint_goes_to_one_process_which_goes_on(ranks, plain):
    at_once, _, kept = ranks(resume, "O2", FP16, "before", False, plain)[0]
    model = Net()
    optimizer = torch.optim.Adam(groups(model, 2), **KINDS["Adam"][1])
    amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0)
    load(kept, model, optimizer)
    assert len(tensors_in(kept)) == 7 + 6 * len(ADAM)
    assert all(map(torch.equal, tensors_in(kept), tensors_in(packed(model, optimizer))))
    for step in range(STEPS // 2, STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            pass_back(loss_of(model, 1000 * rank + 10 * step) / 2, optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    for ours, theirs in zip(values(model), at_once):
        torch.testing.assert_close(ours, theirs, atol=0.01, rtol=0.01)


class WithoutNorm(Net):
    """All its weights have one dtype at every level."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()


def in_buckets(rank: int, change: str) -> list[torch.Tensor]:
    """Weights that change their dtype while a ZeRO optimizer's buckets have them."""
    model = WithoutNorm()
    optimizer = zero(model.parameters(), "SGD", parameters_as_bucket_view=True)
    settings = {"opt_level": "O3", "dtype": BF16, "verbosity": 0}
    if change == "master_weights=False":
        settings |= {"master_weights": False, "opt_level": "O2"}
    amp.initialize(model, optimizer, **settings)
    parallel = DistributedDataParallel(model)
    for step in range(3):
        one_step(parallel, optimizer, rank, step)
    before = values(model)
    amp.deactivate()
    if change == "deactivate":
        parallel = DistributedDataParallel(model)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(parallel, 1000 * rank + step).backward()
            optimizer.step()
    return [*before, *values(model)]


@pytest.mark.parametrize("change", ["initialize", "master_weights=False", "deactivate"])
def test_buckets_hold_weights_that_have_changed_their_dtype(ranks, change):
    first, second = ranks(in_buckets, change)
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0].float(), next(WithoutNorm().parameters()))


def overlapping(rank: int) -> None:
    refused = [("O1", False, {"loss_scale": "dynamic"})]
    refused += [("O2", late, {"loss_scale": 8.0}) for late in (False, True)]
    accepted = [("O1", False, {}), ("O2", False, {})]  # gloo cannot run it
    for level, late, settings in (*refused, *accepted):
        model = Net()
        error = pytest.raises(amp.AmpatchError, match="overlap_with_ddp=True.*loss_scale=1.0")
        settings = {"opt_level": level, "dtype": BF16, "verbosity": 0, **settings}
        if late:
            amp.initialize(model, **settings)
        optimizer = zero(model.parameters(), "SGD", overlap_with_ddp=True)
        with error if "loss_scale" in settings else contextlib.nullcontext():
            amp.add_optimizers(optimizer) if late else amp.initialize(model, optimizer, **settings)
        amp.deactivate()


def test_steps_in_the_backward_pass(ranks):
    ranks(overlapping)
