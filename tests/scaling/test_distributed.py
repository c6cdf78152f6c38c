"""Two gloo ranks on the CPU: DistributedDataParallel and a shared overflow flag."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ddp_training import backward, batch, build, everything
from torch.nn.parallel import DistributedDataParallel

import ampatch as amp
from ampatch.session.registry import registry

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


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
    amp.initialize(
        model, optimizer, opt_level=level, dtype=torch.bfloat16, verbosity=0, loss_scale=128.0
    )
    parallel = DistributedDataParallel(model)
    with parallel.no_sync():
        backward(parallel, optimizer, rank, weight=0.5)
    backward(parallel, optimizer, 10 + rank, weight=0.5)
    return {"grads": [param.grad.clone() for param in amp.master_params(optimizer)]}


def accumulate_for_two_optimizers(rank: int, level: str) -> dict:
    """As above, and a second optimizer updates the last layer too."""
    model, optimizer = build(seed=0)
    pair = [optimizer, torch.optim.SGD(model[2].parameters(), lr=0.1)]
    amp.initialize(
        model, pair, opt_level=level, dtype=torch.bfloat16, verbosity=0, loss_scale=128.0
    )
    parallel = DistributedDataParallel(model)
    with parallel.no_sync():
        backward(parallel, pair, rank, weight=0.5)
    backward(parallel, pair, 10 + rank, weight=0.5)
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


def sharing_the_flag_of_unequal_gradients(rank: int, level: str) -> dict:
    """Each rank trains on data of its own; the delayed unscaling shares the flag too."""
    model, optimizer = build(seed=0)
    amp.initialize(
        model,
        optimizer,
        opt_level=level,
        init_scale=256.0,
        process_group=dist.group.WORLD,
        verbosity=0,
    )
    skipped, moved = [], []
    for number in range(4):
        optimizer.zero_grad()
        before = everything(model, optimizer)
        inputs, targets = batch(10 * rank + number)
        bad = rank == number - 1  # rank 0 in the second step, rank 1 in the third
        loss = F.cross_entropy(model(inputs), targets) * (float("nan") if bad else 1.0)
        delay = number > 1
        with amp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
        moved.append(not all(map(torch.equal, before, everything(model, optimizer))))
    return {
        "skipped": skipped,
        "moved": moved,
        "scale": amp.loss_scale(),
        "weights": everything(model, optimizer),
    }


def average(params) -> None:
    """As tutorials do it by hand: the mean over ranks, through `.data`."""
    for param in params:
        dist.all_reduce(param.grad.data)
        param.grad.data /= dist.get_world_size()


def averaging_by_hand(rank: int, level: str, clip: str) -> dict:
    """Rank 1 overflows in the second of four steps; its gradients reach rank 0 after the block."""
    model, _ = build(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic", init_scale=64.0
    )
    skipped, moved = [], []
    for number in range(4):
        optimizer.zero_grad()
        before = everything(model, optimizer)
        backward(model, optimizer, 10 * rank + number, poison=rank == 1 and number == 1)
        average(model.parameters())
        if clip == "value":  # an inf among the gradients is not to be seen afterwards
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        if clip == "norm":
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
        moved.append(not all(map(torch.equal, before, everything(model, optimizer))))
    weights = everything(model, optimizer)
    return {"skipped": skipped, "moved": moved, "weights": weights, "scale": amp.loss_scale()}


def averaging_for_two_optimizers(rank: int, level: str, inside: bool, as_apex: bool) -> dict:
    """One loss; in the second step rank 1 overflows in the second optimizer's weights."""
    model, _ = build(seed=0)
    pair = [torch.optim.SGD(model[index].parameters(), lr=0.1) for index in (0, 2)]
    registry.opens_as_apex = as_apex
    try:
        amp.initialize(
            model, pair, opt_level=level, verbosity=0, init_scale=64.0, loss_scale="dynamic"
        )
    finally:
        registry.opens_as_apex = False
    scales, skipped = [], []
    for number in range(3):
        for optimizer in pair:
            optimizer.zero_grad()
        inputs, targets = batch(10 * rank + number)
        overflows = rank == 1 and number == 1
        with amp.scale_loss(F.cross_entropy(model(inputs), targets), pair) as scaled_loss:
            scaled_loss.backward()
            if overflows and inside:
                model[2].bias.grad.fill_(float("inf"))
        if overflows and not inside:
            model[2].bias.grad.fill_(float("inf"))
        average(model.parameters())
        for optimizer in pair:
            optimizer.step()
        skipped.append([amp.step_was_skipped(optimizer) for optimizer in pair])
        scales.append((amp.loss_scale(), amp.state_dict()["loss_scaler0"]["unskipped"]))
    return {"weights": everything(model, pair[1]), "scales": scales, "skipped": skipped}


def averaging_after_a_block_for_each(rank: int, level: str) -> dict:
    """Both blocks before both steps; in the second step rank 0 overflows in the second's."""
    model, _ = build(seed=0)
    pair = [torch.optim.SGD(model[index].parameters(), lr=0.1) for index in (0, 2)]
    amp.initialize(model, pair, opt_level=level, verbosity=0, init_scale=64.0, loss_scale="dynamic")
    scales, skipped = [], []
    for number in range(3):
        for index, optimizer in enumerate(pair):
            inputs, targets = batch(10 * rank + number)
            bad = (rank, number, index) == (0, 1, 1)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets) * (float("inf") if bad else 1.0)
            weights = optimizer.param_groups[0]["params"]
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward(inputs=weights)
        average(model.parameters())
        for optimizer in pair:
            optimizer.step()
        skipped.append([amp.step_was_skipped(optimizer) for optimizer in pair])
        scales.append((amp.loss_scale(), amp.state_dict()["loss_scaler0"]["unskipped"]))
    return {"weights": everything(model, pair[1]), "scales": scales, "skipped": skipped}


def reducing_inside_the_last_block(rank: int, level: str) -> dict:
    """Two micro-batches, the first of which waits scaled; the sum is reduced before unscaling."""
    model, optimizer = build(seed=0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=16.0)
    for number in range(2):
        inputs, targets = batch(10 * rank + number)
        loss = F.cross_entropy(model(inputs), targets) / 4
        with amp.scale_loss(loss, optimizer, delay_unscale=number == 0) as scaled_loss:
            scaled_loss.backward()
            if number == 1:
                for grad in [param.grad.data for param in model.parameters()]:
                    dist.all_reduce(grad)
    return {"grads": [param.grad.float() for param in amp.master_params(optimizer)]}


def loading_under_ddp(rank: int, level: str) -> dict:
    """A checkpoint loaded after the broadcast keeps its FP32 values; half weights do not."""
    checkpoint = build(seed=7)[0].state_dict()
    found = {"checkpoint": list(checkpoint.values())}
    for name in ("broadcast", "loaded"):
        model, optimizer = build(seed=rank)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        parallel = DistributedDataParallel(model)
        if name == "loaded":
            parallel.module.load_state_dict(checkpoint)
        optimizer.step()  # without gradients it only settles the masters
        found[name] = [value.detach().clone() for value in amp.master_params(optimizer)]
        found[name + " state"] = [value.clone() for value in model.state_dict().values()]
        amp.deactivate()
    return found


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


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_ranks_agree_bit_by_bit_after_an_overflow_on_one(ranks, level):
    one, two = ranks(train_under_ddp, level)
    assert all(map(torch.equal, one["weights"], two["weights"]))
    assert one["scale"] == two["scale"] and one["skipped"] == two["skipped"]
    assert one["skipped"] == [False, False, level != "O3", False, False]
    assert all(bool(value.isfinite().all()) for value in one["weights"])


@pytest.mark.parametrize("work", [accumulate_under_ddp, accumulate_for_two_optimizers])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_accumulation_with_no_sync_equals_one_big_batch(ranks, level, work):
    one, two = ranks(work, level)
    model, _ = build(seed=0)
    for number in (0, 1, 10, 11):
        inputs, targets = batch(number)
        (F.cross_entropy(model(inputs), targets) / 4).backward()
    for rank in (one, two):
        for grad, parameter in zip(rank["grads"], model.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad, atol=3e-3, rtol=0.05)
    assert all(map(torch.equal, one["grads"], two["grads"]))


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_reducing_inside_the_last_block_is_of_all_micro_batches(ranks, level):
    one, two = ranks(reducing_inside_the_last_block, level)
    model, _ = build(seed=0)
    for number in (0, 1, 10, 11):
        inputs, targets = batch(number)
        (F.cross_entropy(model(inputs), targets) / 4).backward()
    for ours, other, param in zip(one["grads"], two["grads"], model.parameters(), strict=True):
        torch.testing.assert_close(ours, param.grad, atol=3e-3, rtol=0.02)
        assert torch.equal(ours, other)


@pytest.mark.parametrize("clip", ["none", "value", "norm"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_an_overflow_that_reaches_other_ranks_after_the_block_skips_their_steps(ranks, level, clip):
    one, two = ranks(averaging_by_hand, level, clip)
    for rank in (one, two):
        assert rank["skipped"] == [False, True, False, False]
        assert rank["moved"] == [True, False, True, True]
        assert rank["scale"] == 32.0
        assert all(bool(value.isfinite().all()) for value in rank["weights"])
    assert all(map(torch.equal, one["weights"], two["weights"]))


@pytest.mark.parametrize("as_apex", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_of_one_rank_in_the_second_of_two_optimizers(ranks, level, inside, as_apex):
    """Both ranks skip the same steps, and the scale moves once on each.  In apex both steps go."""
    one, two = ranks(averaging_for_two_optimizers, level, inside, as_apex)
    assert all(map(torch.equal, one["weights"], two["weights"]))
    assert all(bool(value.isfinite().all()) for value in one["weights"])
    for rank in (one, two):
        assert rank["scales"] == [(64.0, 1), (32.0, 0), (32.0, 1)]
        assert rank["skipped"] == [[False, False], [as_apex, True], [False, False]]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_of_one_rank_in_the_second_of_two_blocks(ranks, level):
    """It reaches the other rank after both blocks; each block counts once, on both ranks."""
    one, two = ranks(averaging_after_a_block_for_each, level)
    assert all(map(torch.equal, one["weights"], two["weights"]))
    assert one["scales"] == two["scales"]
    for rank in (one, two):
        assert rank["scales"] == [(64.0, 2), (32.0, 0), (32.0, 2)]
        assert rank["skipped"] == [[False, False], [False, True], [False, False]]


def test_a_shared_flag_skips_the_step_on_both_ranks(ranks):
    one, two = ranks(sharing_the_flag, "O1")
    assert one["skipped"] == two["skipped"] == [False, True, False]
    assert one["scale"] == two["scale"] == 2.0**15
    assert all(map(torch.equal, one["weights"], two["weights"]))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_shared_flag_with_unequal_gradients(ranks, level):
    one, two = ranks(sharing_the_flag_of_unequal_gradients, level)
    for rank in (one, two):
        assert rank["skipped"] == [False, True, True, False]
        assert rank["moved"] == [True, False, False, True]
        assert rank["scale"] == 64.0
    assert not all(map(torch.equal, one["weights"], two["weights"]))


def test_masters_under_ddp_are_the_broadcast_or_the_checkpoint(ranks):
    one, two = ranks(loading_under_ddp, "O2")
    for rank in (one, two):
        assert all(map(torch.equal, rank["loaded"], rank["checkpoint"]))
        assert all(map(torch.equal, rank["loaded state"], rank["checkpoint"]))
        assert all(map(torch.equal, rank["broadcast"], one["broadcast"]))
        assert all(map(torch.equal, rank["broadcast"], rank["broadcast state"]))
    assert all(map(torch.equal, two["broadcast"], build(seed=0)[0].parameters()))  # of rank 0


def test_ddp_before_initialize_is_refused_where_it_would_drift(ranks):
    for rank in ranks(wrapped_too_early, "O3"):
        assert "already wrapped in DistributedDataParallel" in rank["error"]
    for level in ("O1", "O2"):
        one, two = ranks(wrapped_too_early, level)
        assert one["error"] is two["error"] is None
        assert all(map(torch.equal, one["weights"], two["weights"]))
