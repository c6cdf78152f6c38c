"""Parameters that are unusual, come late, rest or live elsewhere; optimizers that only look so."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch


def seeded(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def data(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)


def loss_of(model, seed=1):
    inputs, targets = data(seed)
    return F.mse_loss(model(inputs), targets)


def start(level, kind=torch.optim.SGD, dtype=torch.float16, **options):
    model = seeded()
    optimizer = kind(model.parameters(), **(options or {"lr": 0.1}))
    ampatch.initialize(
        model, optimizer, opt_level=level, dtype=dtype, init_scale=1024.0, verbosity=0
    )
    return model, optimizer


def backward(model, optimizer, seed=1, factor=1.0, **options):
    loss = loss_of(model, seed) * factor
    with ampatch.scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()
    return loss


def values(tensors):
    return [tensor.detach().clone() for tensor in tensors]


# Sparse gradients


class Bag(nn.Module):
    def __init__(self, mode=True):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 3, sparse=mode)

    def forward(self, indices):
        return self.table(indices).sum(1)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
@pytest.mark.parametrize("delay", [False, True])
def test_sparse_embeddings(level, kind, delay, half):
    model, plain = Bag(), Bag()
    optimizer = kind(model.parameters(), lr=0.1)
    reference = kind(plain.parameters(), lr=0.1)
    settings = {"loss_scale": None if level == "O0" else "dynamic", "init_scale": 64.0}
    ampatch.initialize(model, optimizer, opt_level=level, dtype=half, verbosity=0, **settings)
    batches = [torch.tensor([[1, 2, 2]]), torch.tensor([[2, 5, 7]])]
    for step in range(4):
        for index, batch in enumerate(batches):
            loss = model(batch).square().sum() * (math.inf if step == 2 else 1.0)
            with ampatch.scale_loss(loss, optimizer, delay_unscale=delay and index == 0) as scaled:
                scaled.backward()
            if step != 2:
                plain(batch).square().sum().backward()
        before = values(ampatch.master_params(optimizer))
        optimizer.step()
        assert ampatch.step_was_skipped(optimizer) is (step == 2 and level != "O0")
        if step == 2:
            assert level == "O0" or torch.equal(before[0], next(ampatch.master_params(optimizer)))
            if level == "O0":
                return  # a static scale does not look
        else:
            reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    (weight,) = ampatch.master_params(optimizer)
    assert torch.allclose(weight, plain.table.weight, atol=0.05)
    assert torch.equal(weight[0], plain.table.weight[0])  # never looked up


# Optimizers that only look like one


class LARC:
    """A wrapper that is no Optimizer: scales gradients by layer, then has the inner one step."""

    def __init__(self, optimizer, trust=0.02):
        self.optim = optimizer
        self.trust = trust

    @property
    def param_groups(self):
        return self.optim.param_groups

    @property
    def state(self):
        return self.optim.state

    def state_dict(self):
        return self.optim.state_dict()

    def zero_grad(self):
        self.optim.zero_grad()

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    norm = param.detach().norm() / param.grad.norm()
                    param.grad.mul_(norm * self.trust / group["lr"])
        self.optim.step()


def test_an_optimizer_that_only_looks_like_one(opt_level):
    plain = seeded()
    reference = LARC(torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    model = seeded()
    optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    ampatch.initialize(model, optimizer, opt_level=opt_level, init_scale=256.0, verbosity=0)
    for step in range(8):
        if step == 4 and opt_level in ("O1", "O2"):
            backward(model, optimizer, factor=math.nan)
            before = values(ampatch.master_params(optimizer))
            optimizer.step()
            assert ampatch.step_was_skipped(optimizer)
            assert all(map(torch.equal, before, ampatch.master_params(optimizer)))
            optimizer.zero_grad()
        backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        loss_of(plain).backward()
        reference.step()
        reference.zero_grad()
    for ours, theirs in zip(ampatch.master_params(optimizer), plain.parameters(), strict=True):
        assert torch.allclose(ours.float(), theirs, atol=0.01)


# Without gradients, frozen, added


def trained_on(model, optimizer, seed):
    optimizer.zero_grad()
    backward(model, optimizer, seed)
    optimizer.step()


def test_frozen_then_thawed_then_frozen_again(opt_level, half):
    """A frozen weight keeps every bit, a thawed one trains in FP32 where there are masters."""
    model, plain = seeded(), seeded()
    for each in (model, plain):
        each[0].weight.requires_grad_(False)
    optimizer, reference = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    ampatch.initialize(model, optimizer, opt_level=opt_level, dtype=half, verbosity=0)
    for seed, thawed in enumerate([False, True, True, False, True]):
        for each in (model, plain):
            each[0].weight.requires_grad_(thawed)
        before = model.state_dict()["0.weight"].clone()
        trained_on(model, optimizer, seed)
        reference.zero_grad()
        loss_of(plain, seed).backward()
        reference.step()
        assert torch.equal(before, model.state_dict()["0.weight"]) is not thawed
    expected = plain.state_dict()
    for name, value in model.state_dict().items():
        assert torch.allclose(value.float(), expected[name], atol=0.01), name
    first = next(ampatch.master_params(optimizer))
    assert first.dtype is (half if opt_level == "O3" else torch.float32)


def test_the_first_gradient_of_a_thawed_weight_may_come_without_scale_loss(half):
    model, optimizer = start("O2", dtype=half)
    ampatch.deactivate()
    model[0].weight.requires_grad_(False)
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=half, verbosity=0)
    model[0].weight.requires_grad_(True)
    loss_of(model).backward()
    plain = seeded()
    loss_of(plain).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    assert norm.item() == pytest.approx(expected.item(), rel=0.02)
    optimizer.step()
    for ours, theirs in zip(ampatch.master_params(optimizer), plain.parameters(), strict=True):
        assert torch.allclose(ours.float(), theirs - 0.1 * theirs.grad, atol=4e-3)


@pytest.mark.parametrize("when", ["before", "after", "in the block", "pending", "before the step"])
def test_add_param_group_at_any_time(opt_level, half, when):
    model, plain = seeded(), seeded()
    optimizer, reference = (
        torch.optim.SGD(m[0].parameters(), lr=0.1, momentum=0.9) for m in (model, plain)
    )

    def add(now):
        if now == when:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})

    add("before")
    ampatch.initialize(model, optimizer, opt_level=opt_level, dtype=half, verbosity=0)
    add("after")
    with ampatch.scale_loss(loss_of(model, 1), optimizer, delay_unscale=True) as scaled:
        add("in the block")
        scaled.backward()
    if when == "pending":
        model[2].zero_grad()  # ampatch has not seen the new ones yet
    add("pending")
    backward(model, optimizer, 2)
    if when == "before the step":
        model[2].zero_grad()
    add("before the step")
    optimizer.step()
    reference.add_param_group({"params": list(plain[2].parameters()), "lr": 0.05})
    for seed in (1, 2):
        loss_of(plain, seed).backward()
        if when == "before the step" or (when == "pending" and seed == 1):
            plain[2].zero_grad()
    reference.step()
    for _ in range(2):
        trained_on(model, optimizer, 3)
        reference.zero_grad()
        loss_of(plain, 3).backward()
        reference.step()
    expected = plain.state_dict()
    for name, value in model.state_dict().items():
        assert torch.allclose(value.float(), expected[name], atol=0.01), name
    kept = half if opt_level == "O3" else torch.float32
    assert {param.dtype for param in ampatch.master_params(optimizer)} == {kept}


def test_param_groups_keep_their_identity(opt_level, half):
    """Schedulers, warm-up code and users hold the list, its dicts and their lists."""
    model = seeded()
    optimizer = torch.optim.SGD(
        [{"params": list(layer.parameters())} for layer in (model[0], model[2])], lr=0.1
    )

    def held():
        groups = optimizer.param_groups
        return [groups, *groups, *(group["params"] for group in groups), optimizer.state]

    before, parameters = held(), [list(group["params"]) for group in optimizer.param_groups]
    ampatch.initialize(model, optimizer, opt_level=opt_level, dtype=half, verbosity=0)
    trained_on(model, optimizer, 1)
    optimizer.param_groups[0]["lr"] = 0.0
    still = values(optimizer.param_groups[0]["params"])
    trained_on(model, optimizer, 2)
    assert all(map(torch.equal, still, optimizer.param_groups[0]["params"]))
    ampatch.set_opt_level(model, "O2")
    ampatch.deactivate()
    assert all(a is b for a, b in zip(before, held(), strict=True))
    for group, params in zip(optimizer.param_groups, parameters, strict=True):
        assert all(a is b for a, b in zip(group["params"], params, strict=True))


# On several devices


class OnTwo(nn.Module):
    """One half lives elsewhere."""

    def __init__(self, elsewhere):
        super().__init__()
        torch.manual_seed(0)
        self.here = nn.Linear(4, 8)
        self.there = nn.Linear(8, 2).to(elsewhere)

    def forward(self, inputs):
        there = self.there.weight.device
        return self.there(torch.tanh(self.here(inputs)).to(there)).to(inputs.device)


@pytest.mark.gpu
def test_parameters_on_two_devices(opt_level, half):
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    model, plain = OnTwo("cuda"), OnTwo("cuda")
    optimizer, reference = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    ampatch.initialize(model, optimizer, opt_level=opt_level, dtype=half, verbosity=0)
    for seed in range(4):
        trained_on(model, optimizer, seed)
        reference.zero_grad()
        loss_of(plain, seed).backward()
        reference.step()
    for ours, theirs in zip(ampatch.master_params(optimizer), plain.parameters(), strict=True):
        assert torch.allclose(ours.float(), theirs, atol=0.02)


def test_unused_parameters_on_another_device_do_no_harm(opt_level, half):
    """`meta` stands for it: such parameters have no gradients, and nothing is copied across."""
    model = seeded()
    model.far = nn.Linear(2, 2, device="meta")
    model.forward = lambda inputs: nn.Sequential.forward(model[:3], inputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level=opt_level, dtype=half, verbosity=0)
    before = values(model[:3].parameters())
    trained_on(model, optimizer, 1)
    assert not all(map(torch.equal, before, model[:3].parameters()))
    assert model.far.weight.device.type == "meta"
    assert [p.device.type for p in ampatch.master_params(optimizer)] == ["cpu"] * 4 + ["meta"] * 2
