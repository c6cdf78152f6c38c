"""O2: the half weight is derived from the master; what is written into either is taken over."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from small_training import data, seeded
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import ampatch
from ampatch.scaling.masters import comparison

BF16 = torch.bfloat16
WHEN = ["before the first step", "later"]


def start(when="later", dtype=BF16, lr=0.1, **options):
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, **options)
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=dtype, init_scale=64.0, verbosity=0)
    if when == "later":
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer, seed=1):
    optimizer.zero_grad()
    inputs, targets = data(seed)
    loss = nn.functional.mse_loss(model(inputs), targets)
    with ampatch.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def masters(optimizer):
    return [p.detach().clone() for p in ampatch.master_params(optimizer)]


def still(model, optimizer):
    """A forward and a step that move nothing but what was written."""
    model(data()[0])
    optimizer.zero_grad()
    optimizer.step()


def expected(before, halves, dtype=BF16):
    """FP32 values after a write into half weights: exact where they differ from the rounding."""
    return [
        torch.where(half == old.to(dtype), old, half.float())
        for old, half in zip(before, halves, strict=True)
    ]


def by_numpy(model):
    for p in model.parameters():
        p.detach().view(torch.int16).numpy()[...] &= -(2**4)


HALF_WRITES = {
    "data.mul_": lambda model: [p.data.mul_(p.data > 0) for p in model.parameters()],
    "data.clamp_": lambda model: [p.data.clamp_(-0.1, 0.1) for p in model.parameters()],
    "data =": lambda model: [setattr(p, "data", p.data * 0.5) for p in model.parameters()],
    "kept alias": lambda model: [p.data.view(-1)[:2].fill_(3.0) for p in model.parameters()],
    "vector_to_parameters": lambda model: vector_to_parameters(
        parameters_to_vector(model.parameters()).detach() * 0.75, model.parameters()
    ),
    "numpy": by_numpy,
    "set in no_grad": lambda model: [nn.init.constant_(p, 0.3) for p in model.parameters()],
    "negative zero": lambda model: [p.data.zero_().neg_() for p in model.parameters()],
}


@pytest.mark.parametrize("on", ["host", "device"])
@pytest.mark.parametrize("seen_by", ["step", "state_dict", "unwrap"])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("write", HALF_WRITES)
def test_what_is_written_into_half_weights_counts(write, when, seen_by, on, monkeypatch):
    if on == "device":  # as where the host may not wait for values
        monkeypatch.setattr(comparison, "is_read_by_host", lambda tensor: False)
    model, optimizer = start(when)
    before = masters(optimizer)
    HALF_WRITES[write](model)
    wanted = expected(before, [p.detach().clone() for p in model.parameters()])
    if seen_by == "step":
        still(model, optimizer)
        found = masters(optimizer)
    elif seen_by == "state_dict":
        found = list(model.state_dict().values())
    else:
        found = list(ampatch.unwrap(model).parameters())
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("write", [name for name in HALF_WRITES if name != "numpy"])
def test_master_params_have_what_was_written_into_half_weights(write, when):
    """As a reader between two steps sees them: an average, a log, a checkpoint by hand."""
    model, optimizer = start(when)
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    HALF_WRITES[write](model)
    wanted = expected(before, [p.detach().clone() for p in model.parameters()])
    for ours, theirs in zip(ampatch.master_params(optimizer), wanted, strict=True):
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def test_master_params_of_a_group_that_was_just_added_are_masters():
    model = nn.Sequential(seeded(), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=BF16, verbosity=0)
    optimizer.add_param_group({"params": model[1].parameters()})
    assert all(param.dtype is torch.float32 for param in ampatch.master_params(optimizer))


def test_large_and_odd_weights_are_compared_too():
    """More than a part holds, channels last, a transposed weight, one of no elements."""
    large = nn.Linear(300, 1001)
    image = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    turned = nn.Module()
    turned.weight = nn.Parameter(torch.randn(4, 6).t()[1:])
    turned.nothing = nn.Parameter(torch.empty(0, 3))
    model = nn.ModuleList([large, image, turned])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=BF16, verbosity=0)
    before = masters(optimizer)
    for parameter in model.parameters():
        if parameter.numel():
            parameter.detach().view(torch.int16).numpy()[..., -1] = 0
    optimizer.step()
    wanted = expected(before, [p.detach() for p in model.parameters()])
    assert all(map(torch.equal, masters(optimizer), wanted))
    assert sum((new != old).sum() for new, old in zip(wanted, before, strict=True)) > 1000


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_values_that_are_not_finite_come_to_rest(dtype):
    """A master beyond the half type keeps its value; NaN in a half weight is taken over once."""
    model, optimizer = start(dtype=dtype)
    with torch.no_grad():
        next(ampatch.master_params(optimizer))[0, 0] = 3e38 if dtype is BF16 else 1e6
    model(data()[0])
    model[2].bias.data[0] = math.nan
    model[2].bias.data[1] = math.inf
    optimizer.zero_grad()
    for _ in range(3):
        optimizer.step()
        found = masters(optimizer)
        assert found[0][0, 0] == (3e38 if dtype is BF16 else 1e6)
        assert found[3][0].isnan() and found[3][1] == math.inf
    assert model[2].bias[0].isnan() and model[2].bias[1] == math.inf


MASTER_WRITES = {
    "in no_grad": lambda optimizer: [p.mul_(0.5) for p in ampatch.master_params(optimizer)],
    "data.clamp_": lambda optimizer: [
        p.data.clamp_(-0.1, 0.1) for p in ampatch.master_params(optimizer)
    ],
    "data.clamp_ of param_groups": lambda optimizer: [
        p.data.clamp_(-0.1, 0.1) for group in optimizer.param_groups for p in group["params"]
    ],
    "data =": lambda optimizer: [
        setattr(p, "data", p.data * 0.5) for p in ampatch.master_params(optimizer)
    ],
    "numpy through data": lambda optimizer: [
        p.data.numpy().fill(0.25) for p in ampatch.master_params(optimizer)
    ],
}


@pytest.mark.parametrize("then", ["forward", "step", "state_dict"])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("write", MASTER_WRITES)
def test_what_is_written_into_masters_counts(write, when, then):
    model, optimizer = start(when)
    before = masters(optimizer)
    with torch.no_grad():
        MASTER_WRITES[write](optimizer)
    wanted = masters(optimizer)
    assert not all(map(torch.equal, before, wanted))
    if then == "forward":
        with torch.no_grad():
            found = model(data()[0])
            plain = seeded()
            for ours, theirs in zip(plain.parameters(), wanted, strict=True):
                ours.copy_(theirs)
            torch.testing.assert_close(found, plain(data()[0]), rtol=0.03, atol=0.03)
    elif then == "step":
        optimizer.zero_grad()
        optimizer.step()
    else:
        assert all(map(torch.equal, model.state_dict().values(), wanted))
    assert all(map(torch.equal, masters(optimizer), wanted))
    for half, master in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(half, master.to(BF16))


@pytest.mark.parametrize("when", WHEN)
def test_schedule_free_swaps_reach_the_forward(when):
    """An optimizer's `eval()` puts averages into the weights, its `train()` takes them out."""

    class Averaging(torch.optim.SGD):
        def swap(self):
            for group in self.param_groups:
                for p in group["params"]:
                    other = self.state[p].setdefault("average", torch.full_like(p, 0.125))
                    held = p.detach().clone()
                    p.data.copy_(other)
                    other.copy_(held)

    model = seeded()
    optimizer = Averaging(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=BF16, verbosity=0)
    if when == "later":
        step(model, optimizer)
    trained, inputs = model(data()[0]), data()[0]
    optimizer.swap()
    averaged = model(inputs)
    assert all((p == 0.125).all() for p in model.parameters())
    assert not torch.equal(trained, averaged)
    optimizer.swap()
    assert torch.equal(model(inputs), trained)


@pytest.mark.parametrize("way", ["data =", "vector_to_parameters"])
@pytest.mark.parametrize("when", WHEN)
def test_float32_data_given_to_half_weights_goes_to_the_masters_whole(when, way):
    """As when a checkpoint is loaded by hand; the model stays a half one."""
    model, optimizer = start(when)
    target = [torch.randn(p.shape) for p in model.parameters()]
    if way == "data =":
        for p, value in zip(model.parameters(), target, strict=True):
            p.data = value.clone()
    else:
        vector_to_parameters(torch.cat([value.flatten() for value in target]), model.parameters())
    assert {p.dtype for p in model.parameters()} == {BF16}
    still(model, optimizer)
    assert all(map(torch.equal, masters(optimizer), target))
    assert all(map(torch.equal, model.parameters(), [value.to(BF16) for value in target]))


@pytest.mark.parametrize("way", ["copy_", "numpy"])
@pytest.mark.parametrize("when", WHEN)
def test_state_dict_values_written_to_count(when, way):
    model, optimizer = start(when)
    target = [torch.randn_like(p, dtype=torch.float32) for p in model.parameters()]
    with torch.no_grad():
        for own, value in zip(model.state_dict().values(), target, strict=True):
            if way == "numpy":
                own.numpy()[...] = value.numpy()
            else:
                own.copy_(value)
    still(model, optimizer)
    assert all(map(torch.equal, masters(optimizer), target))


def test_half_weights_written_to_after_state_dict_was_asked_count():
    model, optimizer = start()
    before = masters(optimizer)
    state = model.state_dict()
    by_numpy(model)
    wanted = expected(before, [p.detach().clone() for p in model.parameters()])
    still(model, optimizer)
    assert all(map(torch.equal, masters(optimizer), wanted)) and len(state) == 4


def test_written_on_both_sides_the_master_wins_and_it_is_said(caplog):
    model, optimizer = start()
    ampatch.log.set_verbosity(1)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        optimizer.param_groups[0]["params"][0].fill_(2.0)
        model[2].bias.fill_(1.0)
    still(model, optimizer)
    assert (masters(optimizer)[0] == 2.0).all() and (masters(optimizer)[3] == 1.0).all()
    assert caplog.text.count("were written into") == 1 and "0.weight" in caplog.text


def test_a_load_is_no_conflict(caplog):
    model, optimizer = start()
    ampatch.log.set_verbosity(1)
    state = {key: value * 1.01 for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert all(map(torch.equal, masters(optimizer), state.values()))
    still(model, optimizer)
    assert all(map(torch.equal, masters(optimizer), state.values())) and not caplog.text


def test_a_parameter_of_two_optimizers_can_be_written_after_either_steps(caplog):
    model = seeded()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    ampatch.initialize(model, optimizers, opt_level="O2", dtype=BF16, verbosity=0)
    ampatch.log.set_verbosity(1)
    loss = model(data()[0]).square().mean()
    with ampatch.scale_loss(loss, optimizers) as scaled:
        scaled.backward()
    optimizers[1].step()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    optimizers[0].zero_grad()
    optimizers[0].step()
    assert (masters(optimizers[0])[0] == 1.0).all() and "were written into" not in caplog.text


def test_data_is_torchs_own_again():
    before = nn.Parameter.data
    model, _ = start()
    assert nn.Parameter.data is not before and type(model[0].weight).__name__ == "Parameter"
    ampatch.deactivate()
    assert nn.Parameter.data is before and "data" not in vars(nn.Parameter)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert not any(vars(p) for p in model.parameters())


# State dicts that are held


ALIAS_WRITES = {
    "data": lambda alias: alias.data.fill_(0.5),
    "numpy": lambda alias: alias.numpy().__setitem__(..., 0.5),
    "a view": lambda alias: alias.view(-1).data.fill_(0.5),
    "fill_": lambda alias: alias.fill_(0.5),
}


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("way", ALIAS_WRITES)
@pytest.mark.parametrize("between", [False, True], ids=["before the forward", "before the step"])
def test_writes_into_a_state_dict_held_over_steps_count(steps, way, between, half):
    """As in plain PyTorch: what it gave aliases the weights for as long as it lives."""
    model, optimizer = start("fresh", half)
    own = model.state_dict()
    for seed in range(steps):
        step(model, optimizer, seed)
    name = next(iter(own))
    inputs, targets = data(5)
    optimizer.zero_grad()
    if between:
        loss = nn.functional.mse_loss(model(inputs), targets)
        with ampatch.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
    ALIAS_WRITES[way](own[name])
    if not between:
        model(inputs)
        assert bool((dict(model.named_parameters())[name] == 0.5).all())
    grad = next(iter(ampatch.master_params(optimizer))).grad
    expected = torch.full_like(model.state_dict()[name], 0.5)
    expected -= 0 if grad is None else 0.1 * grad.float()
    optimizer.step()
    torch.testing.assert_close(model.state_dict()[name], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(own[name], expected, rtol=0, atol=1e-6)
    assert torch.equal(dict(model.named_parameters())[name], expected.to(half))


def test_writes_into_half_weights_beside_a_held_state_dict():
    """It says who wrote, not that the masters win."""
    model, optimizer = start("later")
    own = model.state_dict()
    step(model, optimizer)
    first, second = list(model.parameters())[:2]
    first.data.fill_(0.25)
    own[[name for name, _ in model.named_parameters()][1]].data.fill_(0.75)
    still(model, optimizer)
    for weight, value in ((first, 0.25), (second, 0.75)):
        assert bool((weight == value).all())
    assert [float(master.mean()) for master in masters(optimizer)[:2]] == [0.25, 0.75]


def test_a_state_dict_that_is_gone_costs_nothing():
    """No copies of half weights are left once it is dropped and a step has been made."""

    def alive():
        gc.collect()
        halves = [found for found in gc.get_objects() if type(found) is torch.Tensor]
        return sum(found.numel() for found in halves if found.dtype is BF16)

    model, optimizer = start("later")
    step(model, optimizer)
    before = alive()
    own = model.state_dict()
    for _ in range(3):
        step(model, optimizer)
        own = model.state_dict()
    step(model, optimizer)
    copies = sum(p.numel() for p in model.parameters())
    assert alive() == before + copies
    del own
    step(model, optimizer)
    assert alive() == before
