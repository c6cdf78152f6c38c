"""Two gloo ranks on the CPU: DistributedDataParallel, averages by hand, a shared overflow flag.

Trainings in DDP beside one process, and overflows in them, are in `tests/interop/test_ddp.py`.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ddp_training import backward, batch, build, everything
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
