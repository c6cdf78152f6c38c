"""`DDP.join()` and `Join([ddp, zero])` with two gloo ranks, of which one runs out of data."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ddp_training import batch, build
from small_training import pass_back, step
from torch.nn.parallel import DistributedDataParallel

import ampatch as amp

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

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
                        pass_back(loss, optimizer)
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
                step(loss_of(model, 0), optimizer)
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
