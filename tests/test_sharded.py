"""FSDP2 (`fully_shard`): O1 works on sharded parameters, the other levels say why not."""

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


def refused(rank: int, level: str, dtype: torch.dtype) -> dict:
    model = sharded(dtype)
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    before = whole(model.parameters())
    try:
        amp.initialize(model, optimizer, opt_level=level, dtype=torch.bfloat16, verbosity=0)
    except amp.AmpatchError as error:
        same = all(map(torch.equal, before, whole(model.parameters())))
        return {"error": str(error), "same": same and "step" not in vars(optimizer)}
    return {"error": None}


@pytest.mark.parametrize(
    "level, dtype",
    [("O2", torch.float32), ("O3", torch.float32), ("O0", torch.bfloat16), ("O1", torch.bfloat16)],
)
def test_levels_that_would_touch_sharded_parameters_are_refused(ranks, level, dtype):
    for rank in ranks(refused, level, dtype):
        assert "sharded parameter 'shift'" in rank["error"] and rank["same"]
        assert 'opt_level="O1"' in rank["error"]


def test_o0_has_nothing_to_change(ranks):
    assert [rank["error"] for rank in ranks(refused, "O0", torch.float32)] == [None, None]
