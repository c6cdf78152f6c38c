"""`DDP.join()` and `Join([ddp, zero])` with two gloo ranks, of which one runs out of data."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ddp_training import batch, build
from torch.nn.parallel import DistributedDataParallel

import ampatch as amp

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

BATCHES = {0: 3, 1: 6, 2: 4, 3: 0}  # the others run out of data before rank 1


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


def uneven(rank: int, level: str, dtype, settings: dict) -> dict:
    """Two epochs; in the first rank 1 sees an inf when rank 0 has run out already.

    "FP32" is plain torch; both ranks leave the poisoned step out.
    """
    model, is_plain = build(seed=0)[0], level == "FP32"
    optimizer = optimizer_of(model, settings)
    parallel = DistributedDataParallel(model) if settings.get("wrapped first") else model
    if not is_plain:
        options = {"init_scale": 256.0, "growth_interval": 4, "verbosity": 0}
        options |= {} if level == "O0" else {"loss_scale": "dynamic"}
        amp.initialize(parallel, optimizer, opt_level=level, dtype=dtype, **options)
    if not settings.get("wrapped first"):
        parallel = DistributedDataParallel(model)
    micro = settings.get("micro", 1)
    skipped, scales, weights = [], [], []
    for epoch in range(2):
        with joining(parallel, optimizer, settings):
            for step in range(BATCHES[rank]):
                is_bad = (rank, epoch, step) == (1, 0, 4) and level != "O0"
                if is_bad and is_plain:
                    continue
                optimizer.zero_grad()
                for part in range(micro):
                    last = part == micro - 1
                    with contextlib.nullcontext() if last else parallel.no_sync():
                        loss = loss_of(parallel, 1000 * rank + 100 * epoch + 10 * step + part)
                        loss = loss * float("inf") if is_bad else loss / micro
                        if is_plain:
                            loss.backward()
                            continue
                        with amp.scale_loss(loss, optimizer) as scaled:
                            scaled.backward()
                optimizer.step()
                skipped.append(not is_plain and amp.step_was_skipped(optimizer))
        masters = [] if is_plain else amp.master_params(optimizer)
        scales.append(1.0 if is_plain else amp.loss_scale())
        weights.append([p.detach().clone() for p in masters])
        weights.append([p.detach().clone() for p in model.parameters()])
    kept = None if is_plain else amp.state_dict()
    amp.deactivate()
    return {"skipped": skipped, "scales": scales, "weights": weights, "state": kept}


CASES = [
    ("O0", torch.float16, {}),
    ("O1", torch.float16, {"micro": 2}),
    ("O2", torch.float16, {}),
    ("O2", torch.float16, {"wrapped first": True}),
    ("O2", torch.bfloat16, {"static_divisor": False, "micro": 2}),
    ("O3", torch.bfloat16, {}),
    ("O1", torch.float16, {"zero": True}),
    ("O2", torch.float16, {"zero": True}),
]


HERE = [CASES[3], CASES[6]]  # in the default run; what the others could break is in these


@pytest.mark.parametrize(
    "level, dtype, settings",
    [case if case in HERE else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_a_rank_without_data_follows_the_others(ranks, level, dtype, settings):
    one, two = ranks(uneven, level, dtype, settings)
    assert one["skipped"] == [False] * 6
    if level != "O0":
        # rank 1: four steps double the scale, the fifth halves it; one good step, then 6
        assert two["skipped"] == [step == 4 for step in range(12)]
        assert one["scales"] == two["scales"] == [256.0, 512.0]
    assert one["state"] == two["state"]
    for ours, theirs in zip(one["weights"], two["weights"], strict=True):
        assert all(map(torch.equal, ours, theirs))
    wide = 0.1 if level == "O3" else 0.03
    if level != "O0":
        plain = ranks(uneven, "FP32", dtype, settings)[0]["weights"][-1]
        for ours, theirs in zip(one["weights"][-2], plain, strict=True):
            torch.testing.assert_close(ours.float(), theirs, atol=wide, rtol=wide)


def with_a_process_group(rank: int) -> str:
    model, optimizer = build(seed=0)
    amp.initialize(model, optimizer, opt_level="O1", process_group=dist.group.WORLD, verbosity=0)
    try:
        with DistributedDataParallel(model).join():
            pass
    except amp.AmpatchError as error:
        return str(error)
    return "taken"


def with_zero_first(rank: int) -> str:
    from torch.distributed.algorithms.join import Join

    model = build(seed=0)[0]
    optimizer = optimizer_of(model, {"zero": True})
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    try:
        with Join([optimizer]):
            with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
    except amp.AmpatchError as error:
        return str(error)
    return "taken"


def test_what_join_cannot_shadow_is_refused(ranks):
    for error in ranks(with_a_process_group):
        assert "Leave process_group out" in error
    for error in ranks(with_zero_first):
        assert "Join([model, optimizer])" in error


@pytest.mark.parametrize("without", [0, 1])
def test_a_rank_without_any_data_agrees_too(ranks, without):
    """Wrapped before `initialize`: ranks compare in their first pass, which it does not make."""
    first, second = ranks(_wrapped_first, without)
    assert all(map(torch.equal, first[0], second[0])) and first[1] == second[1] == 512.0


def _wrapped_first(rank: int, without: int):
    model, optimizer = build(seed=0)
    parallel = DistributedDataParallel(model)
    amp.initialize(parallel, optimizer, opt_level="O1", loss_scale="dynamic", init_scale=512.0)
    with parallel.join():
        for step in range(0 if rank == without else 3):
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(parallel, step), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
    return list(model.parameters()), amp.loss_scale()


@pytest.mark.slow
@pytest.mark.parametrize("level, dtype, settings", CASES[1:])
def test_four_ranks_of_which_one_has_no_data(four_ranks, level, dtype, settings):
    results = four_ranks(uneven, level, dtype, settings)
    assert results[3]["skipped"] == []
    for one in results:
        assert one["state"] == results[0]["state"] and one["scales"] == results[0]["scales"]
        for ours, theirs in zip(one["weights"], results[0]["weights"], strict=True):
            assert all(map(torch.equal, ours, theirs))
