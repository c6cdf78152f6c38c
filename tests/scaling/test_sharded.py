"""FSDP2 (`fully_shard`) at O1, shards that came in half, and FSDP1."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ampatch as amp

pytest.importorskip("torch.distributed.fsdp", reason="torch without FSDP")
if not hasattr(torch.distributed.fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}
STEPS = 5


class Net(nn.Module):
    """`shift` enters the loss by `push`, element by element: an inf there stays in one shard."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor, push: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers(x), (self.shift * push).sum()


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.Generator().manual_seed(number)
    return torch.randn(8, 6, generator=data), torch.randint(0, 4, (8,), generator=data)


def loss_of(model: nn.Module, number: int, poisoned: bool = False) -> torch.Tensor:
    push = torch.full((4,), 0.1)
    if poisoned:
        push[3] = float("inf")  # the last element: in rank 1's shard
    inputs, targets = batch(number)
    outputs, pushed = model(inputs, push)
    return F.cross_entropy(outputs.float(), targets) + pushed


def sharded(dtype: torch.dtype = torch.float32) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = Net().to(dtype)
    for layer in (model.layers[0], model.layers[3]):
        fully_shard(layer)
    return fully_shard(model)


def whole(tensors) -> list[torch.Tensor]:
    return [tensor.detach().full_tensor().clone() for tensor in tensors]


def train(rank: int, kind: str, group: bool, micro: int, sync: bool, poisoned: tuple) -> dict:
    model = sharded()
    optimizer = OPTIMIZERS[kind](model.parameters())
    amp.initialize(
        model,
        optimizer,
        opt_level="O1",
        init_scale=256.0,
        process_group=dist.group.WORLD if group else None,
        verbosity=0,
    )
    half = model(torch.randn(2, 6), torch.zeros(4))[0].dtype
    skipped, scales, dtypes = [], [], set()
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(micro):
            model.set_requires_gradient_sync(sync or part == micro - 1)
            bad = step in poisoned and part == 0
            loss = loss_of(model, 1000 * rank + 10 * step + part, bad) / micro
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        dtypes |= {param.grad.dtype for param in model.parameters()}
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
        scales.append(amp.loss_scale())
    weights = whole(model.parameters())
    state = whole(value for value in model.state_dict().values())
    return {
        "weights": weights,
        "state": state,
        "skipped": skipped,
        "scales": scales,
        "dtypes": dtypes,
        "half": half,
    }


def in_one_process(kind: str, micro: int, left_out: tuple) -> list[torch.Tensor]:
    """The same in FP32 without shards."""
    model = Net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            for part in range(micro):
                (loss_of(model, 1000 * rank + 10 * step + part) / (2 * micro)).backward()
        if step not in left_out:
            optimizer.step()
    return [param.detach() for param in model.parameters()]


CASES = [(kind, 1, True) for kind in OPTIMIZERS] + [("SGD", 2, True), ("AdamW fused", 2, False)]


@pytest.mark.parametrize("kind, micro, sync", CASES)
@pytest.mark.parametrize("group", [True, False])
@pytest.mark.parametrize("poisoned", [(), (2,)], ids=["clean", "overflow in one shard"])
def test_o1_on_sharded_parameters(ranks, kind, group, micro, sync, poisoned):
    """As FP32 in one process; an inf that only one rank's shard holds skips the step on both."""
    one, two = ranks(train, kind, group, micro, sync, poisoned)
    assert one["skipped"] == two["skipped"] == [step in poisoned for step in range(STEPS)]
    assert one["scales"] == two["scales"]
    assert one["scales"][-1] == (128.0 if poisoned else 256.0)
    assert one["dtypes"] == {torch.float32} and one["half"] is torch.float16
    for ours, theirs, reference in zip(
        one["weights"], two["weights"], in_one_process(kind, micro, poisoned), strict=True
    ):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, reference, atol=0.01, rtol=0.05)
    assert all(map(torch.equal, one["weights"], one["state"]))


def partly_sharded(rank: int, scale: float | str) -> dict:
    """Only the layers are sharded; `shift` is a plain parameter beside DTensors."""
    from torch.distributed.fsdp import fully_shard

    model = Net()
    fully_shard(model.layers)
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    amp.initialize(
        model,
        optimizer,
        opt_level="O1",
        loss_scale=scale,
        init_scale=256.0,
        process_group=dist.group.WORLD,
        verbosity=0,
    )
    skipped = []
    for step in range(3):
        optimizer.zero_grad()
        bad = scale == "dynamic" and (rank, step) == (0, 1)
        with amp.scale_loss(loss_of(model, 10 * rank + step, bad), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
    return {"skipped": skipped, "shift": model.shift.detach().clone()}


@pytest.mark.parametrize("scale", ["dynamic", 128.0])
def test_plain_parameters_beside_sharded_ones(ranks, scale):
    one, two = ranks(partly_sharded, scale)
    assert one["skipped"] == two["skipped"] == [False, scale == "dynamic", False]
    shift = torch.zeros(4, requires_grad=True)  # its gradient is 0.1 in every step made
    optimizer = OPTIMIZERS["SGD"]([shift])
    for _ in range(one["skipped"].count(False)):
        shift.grad = torch.full((4,), 0.1)
        optimizer.step()
    for rank in (one, two):
        torch.testing.assert_close(rank["shift"], shift.detach(), atol=1e-5, rtol=1e-3)


def first_version(rank: int, level: str, use_orig_params: bool) -> dict:
    """FullyShardedDataParallel, the wrapper."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(
        Net(), use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    try:
        amp.initialize(model, optimizer, opt_level=level, init_scale=256.0, verbosity=0)
    except amp.AmpatchError as error:
        return {"error": str(error)}
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = loss_of(model, rank)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"error": None, "losses": losses}


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_first_fsdp(ranks, use_orig_params):
    for rank in ranks(first_version, "O1", use_orig_params):
        assert rank["error"] is None and rank["losses"][-1] < rank["losses"][0]
    for level in ("O2", "O3"):
        for rank in ranks(first_version, level, use_orig_params):
            assert "sharded parameter" in rank["error"]


def in_half(rank: int, level: str, dtype: torch.dtype) -> dict:
    """Shards that are half already when the model is initialized."""
    model = sharded(dtype)
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    before = whole(model.parameters())
    try:
        amp.initialize(model, optimizer, opt_level=level, dtype=torch.bfloat16, verbosity=0)
    except amp.AmpatchError as error:
        same = all(map(torch.equal, before, whole(model.parameters())))
        return {"error": str(error), "same": same and "step" not in vars(optimizer)}
    shards = {parameter.dtype for parameter in model.parameters()}
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = loss_of(model, rank)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    amp.deactivate()
    after = {parameter.dtype for parameter in model.parameters()}
    return {"error": None, "shards": shards, "losses": losses, "after": after}


def test_half_shards_stay_half_at_o1(ranks):
    for rank in ranks(in_half, "O1", torch.bfloat16):
        assert rank["shards"] == rank["after"] == {torch.bfloat16}
        assert rank["losses"][-1] < rank["losses"][0]


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_half_shards_become_fp32_until_deactivate(ranks, level):
    for rank in ranks(in_half, level, torch.bfloat16):
        assert rank["shards"] == {torch.float32} and rank["after"] == {torch.bfloat16}
        assert rank["losses"][-1] < rank["losses"][0]
