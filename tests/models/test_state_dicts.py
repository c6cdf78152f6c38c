"""`state_dict()` of half models: what is written into it counts, what the user puts in stays."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch

HALF_LEVELS = pytest.mark.parametrize("level", ["O2", "O3"])
STARTED = pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Linear(4, 2))


def start(level, dtype=torch.bfloat16, model=None, **settings):
    model = build() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    ampatch.initialize(model, optimizer, opt_level=level, dtype=dtype, verbosity=0, **settings)
    return model, optimizer


def backward(model, optimizer, seed=0):
    optimizer.zero_grad()
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
    with ampatch.scale_loss(model(x).square().mean(), optimizer) as scaled:
        scaled.backward()


def train(model, optimizer, steps=2):
    for seed in range(steps):
        backward(model, optimizer, seed)
        optimizer.step()


def new_values(model):
    generator = torch.Generator().manual_seed(11)
    return {
        name: torch.rand(value.shape, generator=generator) + 0.5
        for name, value in model.state_dict().items()
        if value.is_floating_point()
    }


WRITES = {
    "copy_": lambda own, key, value: own[key].copy_(value),
    "mul_ add_": lambda own, key, value: own[key].mul_(0).add_(value),
    "data": lambda own, key, value: own[key].data.copy_(value),
    "by element": lambda own, key, value: own[key].view(-1).copy_(value.view(-1)),
}


@HALF_LEVELS
@STARTED
@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("keep_vars", [False, True])
def test_writes_into_the_state_dict_count(level, trained, way, keep_vars, half):
    """They reach the forward, the next state dict and the training, as in FP32."""
    model, optimizer = start(level, half)
    if trained:
        train(model, optimizer)
    plain = build()
    values = new_values(plain)
    plain.load_state_dict({**plain.state_dict(), **values})
    with torch.no_grad():
        own = model.state_dict(keep_vars=keep_vars)
        for name, value in values.items():
            WRITES[way](own, name, value)
    del own
    x = torch.randn(6, 3)
    torch.testing.assert_close(model.eval()(x), plain.eval()(x), rtol=0.05, atol=0.05)
    for name, value in model.state_dict().items():
        if name in values:
            exact = values[name] if level == "O2" else values[name].to(half).float()
            assert torch.equal(value, exact) or "running" in name, name
    model.train()
    optimizer.zero_grad()
    optimizer.step()
    for name, value in model.state_dict().items():
        if name in values:
            torch.testing.assert_close(value, values[name], rtol=0.01, atol=0.01)


@HALF_LEVELS
def test_a_state_dict_held_since_the_start_stays_an_alias(level):
    """Both ways: it shows what training does, and is written into at any time."""
    model, optimizer = start(level)
    own = model.state_dict()
    train(model, optimizer)
    fresh = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(torch.equal(own[name], fresh[name]) for name in fresh)
    backward(model, optimizer)
    gradient = ampatch.master_params(optimizer)
    gradient = next(iter(gradient)).grad.detach().float().clone()
    own["0.weight"].fill_(1.5)
    optimizer.step()
    expected = 1.5 - 0.125 * gradient
    torch.testing.assert_close(own["0.weight"], expected, rtol=0.01, atol=1e-6)
    torch.testing.assert_close(model.state_dict()["0.weight"], expected, rtol=0.01, atol=1e-6)


@HALF_LEVELS
def test_writes_into_half_weights_are_not_undone_by_a_held_state_dict(level):
    model, optimizer = start(level)
    own = model.state_dict()
    with torch.no_grad():
        model[0].weight.fill_(0.25)
        own["3.bias"].fill_(0.75)
    model[3].weight.data.fill_(2.0)
    model(torch.randn(4, 3))
    train(model, optimizer, steps=0)
    for found in (own, model.state_dict()):
        assert bool((found["0.weight"] == 0.25).all())
        assert bool((found["3.bias"] == 0.75).all()) and bool((found["3.weight"] == 2).all())
    assert bool((model[3].bias == 0.75).all()) and bool((model[0].weight == 0.25).all())


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_frozen_half_weights_too(level):
    model = build().requires_grad_(False)
    model[3].requires_grad_(True)
    model, _ = start(level, model=model)
    model.state_dict()["0.weight"].fill_(0.5)
    model(torch.randn(4, 3))
    assert bool((model[0].weight == 0.5).all())
    model.state_dict()["0.bias"].fill_(0.5)
    ampatch.deactivate()
    assert bool((model[0].bias == 0.5).all())


def test_a_saved_state_dict_does_not_invalidate_a_graph():
    model, optimizer = start("O3")
    loss = model(torch.randn(4, 3)).square().mean()
    model.state_dict()
    with ampatch.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def test_widened_copies_go_when_the_model_is_used_next():
    model, _ = start("O3")
    held = weakref.ref(model.state_dict()["0.weight"])
    assert held() is not None
    model(torch.randn(4, 3))
    assert held() is None


# The user's own


def quantized(state_dict, prefix=""):
    key = prefix + "weight"
    if key in state_dict:
        state_dict[prefix + "packed"] = state_dict.pop(key).mul(100).round().to(torch.int32)


def post_hook(module, state_dict, prefix, metadata):
    quantized(state_dict, prefix)


def private_hook(module, state_dict, prefix, metadata):
    quantized(state_dict, prefix)
    return state_dict


HOOKS = {
    "post hook": lambda module: module.register_state_dict_post_hook(post_hook),
    "private hook": lambda module: module._register_state_dict_hook(private_hook),
}


@HALF_LEVELS
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("first", [True, False], ids=["theirs first", "ours first"])
def test_state_dict_hooks_of_the_user_win(level, kind, first):
    model = build()
    if first:
        HOOKS[kind](model[3])
    model, _ = start(level, model=model)
    if not first:
        HOOKS[kind](model[3])
    state = model.state_dict()
    expected = build()[3].weight
    if level == "O3":
        expected = expected.to(torch.bfloat16).float()
    assert "3.weight" not in state and torch.equal(
        state["3.packed"], expected.mul(100).round().to(torch.int32)
    )
    assert state["0.weight"].dtype is torch.float32


@HALF_LEVELS
@pytest.mark.parametrize("first", [True, False], ids=["theirs first", "ours first"])
def test_a_hook_that_replaces_a_value_wins(level, first):
    def replace(module, state_dict, prefix, metadata):
        state_dict[prefix + "weight"] = torch.full((2, 4), 7.0, dtype=torch.float16)

    model = build()
    if first:
        model[3].register_state_dict_post_hook(replace)
    model, _ = start(level, model=model)
    if not first:
        model[3].register_state_dict_post_hook(replace)
    found = model.state_dict()["3.weight"]
    assert found.dtype is torch.float16 and bool((found == 7).all())


class Custom(nn.Linear):
    """Saves a quantized weight, and what it calls `half` as it is; loads them again."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach().float() * 2
        destination[prefix + "extra"] = self.bias.detach().clone().double()

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        state_dict = {key: value for key, value in state_dict.items() if "extra" not in key}
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"] / 2
        super()._load_from_state_dict(state_dict, prefix, *rest)


@HALF_LEVELS
def test_an_overridden_save_and_load_win(level):
    model, _ = start(level, model=nn.Sequential(Custom(3, 2), nn.Linear(2, 2)))
    state = model.state_dict()
    half = model[0].weight.detach().float()
    assert torch.equal(state["0.weight"], half * 2) and state["0.extra"].dtype is torch.float64
    state["0.weight"] = torch.full((2, 3), 1 / 3)
    del state["0.extra"]
    model.load_state_dict(state)
    expected = torch.full((2, 3), 1 / 6)
    if level == "O3":
        expected = expected.to(torch.bfloat16).float()
    assert torch.equal(copy.deepcopy(model)[0].weight, expected)


class OwnStateDict(nn.Linear):
    def state_dict(self, *args, **kwargs):
        return {"mine": torch.ones(1)}


@HALF_LEVELS
def test_an_overridden_state_dict_wins(level):
    model, _ = start(level, model=nn.Sequential(OwnStateDict(3, 2), nn.Linear(2, 2)))
    assert model[0].state_dict() == {"mine": torch.ones(1)}


@pytest.mark.parametrize("first", [True, False], ids=["theirs first", "ours first"])
def test_load_hooks_of_the_user_win(first):
    """What a hook makes of a checkpoint reaches the masters in FP32, whoever came first."""

    def unpack(module, state_dict, prefix, *rest):
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "packed") / 3

    model = build()
    if first:
        model[3].register_load_state_dict_pre_hook(unpack)
    model, optimizer = start("O2", model=model)
    if not first:
        model[3].register_load_state_dict_pre_hook(unpack)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["3.packed"] = torch.full((2, 4), 1.0)
    state["3.weight"] = torch.full((2, 4), 9.0)
    model.load_state_dict(state)
    expected = torch.full((2, 4), 1 / 3)
    assert torch.equal(model.state_dict()["3.weight"], expected)
    optimizer.step()
    assert torch.equal(model.state_dict()["3.weight"], expected)


def test_pre_hooks_of_the_user_are_called_before():
    model, _ = start("O2")

    def zero(module, prefix, keep_vars):
        with torch.no_grad():
            module.weight.zero_()

    model[3].register_state_dict_pre_hook(zero)
    assert not model.state_dict()["3.weight"].any()


def test_loss_of_nothing_when_saved_in_training():
    """Saving each step changes nothing: the run is the one that saves never, bit by bit."""
    ends = []
    for saves in (False, True):
        model, optimizer = start("O3")
        for seed in range(6):
            backward(model, optimizer, seed)
            if saves:
                F.mse_loss(model.state_dict()["0.weight"], torch.zeros(4, 3))
            optimizer.step()
            if saves:
                held = model.state_dict()
        ends.append({name: value.clone() for name, value in model.state_dict().items()})
        ampatch.deactivate()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0]) and held


@pytest.mark.parametrize("level", ["O3", "O2 with a frozen layer"])
@pytest.mark.parametrize("used_in", ["inference mode", "training"])
def test_a_state_dict_made_in_inference_mode_is_one_like_any(level, used_in):
    """The model is used afterwards, the values are written into, and it trains on."""
    model = build()
    model[0].requires_grad_("frozen" not in level)
    model, optimizer = start(level[:2], model=model)
    with torch.inference_mode():
        own = model.state_dict()
        if used_in == "inference mode":
            model.eval()(torch.randn(4, 3))
    model.train()(torch.randn(4, 3))
    own["0.weight"].fill_(0.5)
    model(torch.randn(4, 3))
    assert bool((model[0].weight == 0.5).all())
    train(model, optimizer)
    with torch.inference_mode():
        assert all(torch.equal(own[name], value) for name, value in model.state_dict().items())
    ampatch.deactivate()


@HALF_LEVELS
def test_what_is_loaded_is_not_undone_by_a_held_state_dict(level):
    """Half buffers have FP32 values of before the conversion, which the held state dict shows."""
    model = nn.BatchNorm1d(3).eval()
    model.running_mean.copy_(torch.tensor([0.1, 0.2, 0.3]))
    start(level, model=model, keep_batchnorm_fp32=False)
    held = model.state_dict()
    assert torch.equal(held["running_mean"], torch.tensor([0.1, 0.2, 0.3]))
    loaded = {name: value + 1 for name, value in held.items()}
    model.load_state_dict(loaded)
    model(torch.zeros(2, 3))
    assert torch.equal(model.running_mean, loaded["running_mean"].bfloat16())
    assert torch.equal(model.state_dict()["running_mean"], loaded["running_mean"])
    assert torch.equal(held["running_mean"], loaded["running_mean"]), "an alias, as in PyTorch"
    ampatch.deactivate()
    assert torch.equal(model.running_mean, loaded["running_mean"])


@HALF_LEVELS
@pytest.mark.parametrize("way", ["loaded", "written"])
def test_nans_in_a_held_state_dict_undo_nothing(level, way):
    """A diverged model gets its best weights back; NaN, which differs from itself, is no write."""
    model = build().requires_grad_(level == "O3")
    best = new_values(model)
    start(level, model=nn.Sequential(model, nn.Linear(2, 2)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    held = model.state_dict()
    if way == "loaded":
        model.load_state_dict(best, strict=False)
    else:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(best[name])
    model(torch.zeros(2, 3))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, best[name].to(parameter.dtype))
        assert torch.equal(held[name], parameter.float()), "an alias, as in PyTorch"
    ampatch.deactivate()
