"""A model and its optimizer copied, saved or pickled together: the copies belong together."""

from __future__ import annotations

import copy
import io
import pickle
import types

import pytest
import torch
from session_pairs import build, one_step
from small_training import data, managed
from torch import nn

import ampatch


def start(level, kind=torch.optim.AdamW, model=None):
    return managed(build() if model is None else model, level, kind=kind, lr=0.05)


def train(model, optimizer):
    for number in range(3):
        one_step(model, optimizer, number)


def train_plain(model, optimizer):
    for number in range(9, 12):
        x, y = data(number)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.to(model[0].weight.dtype)).float(), y).backward()
        optimizer.step()


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "protocol 2": lambda value: pickle.loads(pickle.dumps(value, 2)),
    "torch.save": saved,
}
PAIRS = {
    "model first": (lambda m, o: (m, o), lambda pair: pair),
    "optimizer first": (lambda m, o: (o, m), lambda pair: pair[::-1]),
    "dict": (lambda m, o: {"o": o, "m": m}, lambda pair: (pair["m"], pair["o"])),
    "object": (
        lambda m, o: types.SimpleNamespace(trainer={"optimizer": o}, model=m),
        lambda held: (held.model, held.trainer["optimizer"]),
    ),
    "submodule": (lambda m, o: (nn.ModuleList([m]), o), lambda pair: (pair[0][0], pair[1])),
}


@pytest.mark.parametrize(
    "opt_level, pair, way",
    [
        *(("O2", pair, way) for pair in PAIRS for way in WAYS),
        *((level, "model first", way) for level in ("O0", "O1", "O3") for way in WAYS),
    ],
)
def test_a_copied_pair_trains(pair, way, opt_level):
    """Its optimizer holds the copied model's parameters, with their state: as FP32 goes on."""
    model, optimizer = start(opt_level)
    train(model, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pack, unpack = PAIRS[pair]
    copied, its_optimizer = unpack(WAYS[way](pack(model, optimizer)))
    held = [param for group in its_optimizer.param_groups for param in group["params"]]
    own = list(copied.parameters())
    assert len(held) == len(own) and all(a is b for a, b in zip(held, own, strict=True))
    assert set(map(id, its_optimizer.state)) == set(map(id, own))
    kept = torch.bfloat16 if opt_level == "O3" else torch.float32
    assert {param.dtype for param in own} == {kept}
    for state in its_optimizer.state.values():
        assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {kept}
    assert not {"step", "zero_grad", "__deepcopy__", "__reduce_ex__"} & set(vars(its_optimizer))
    reference = build().to(kept)
    reference.load_state_dict(before)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.05)
    theirs.load_state_dict(optimizer.state_dict())
    with ampatch.disable_casts():
        train_plain(reference, theirs)
        train_plain(copied, its_optimizer)
    for ours, plain in zip(copied.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


@pytest.mark.parametrize("way", WAYS)
def test_what_was_written_into_weights_is_in_both(way):
    model, optimizer = start("O2", kind=torch.optim.SGD)
    train(model, optimizer)
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    its_optimizer, copied = WAYS[way]((optimizer, model))
    assert its_optimizer.param_groups[0]["params"][0] is copied[0].weight
    assert torch.equal(copied[0].weight, torch.full((8, 4), 0.5))


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_alone_is_copied_plain(way, opt_level):
    model, optimizer = start(opt_level)
    train(model, optimizer)
    copied = WAYS[way](optimizer)
    assert type(copied) is type(optimizer) and set(vars(copied)) <= set(vars(optimizer))
    assert not {"step", "zero_grad", "__deepcopy__", "__reduce_ex__"} & set(vars(copied))
    values = [param for group in copied.param_groups for param in group["params"]]
    for ours, theirs in zip(values, ampatch.master_params(optimizer), strict=True):
        assert ours is not theirs and torch.equal(ours.float(), theirs.float())


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_shallow_copy_of_an_optimizer_shares_its_parameters(level):
    """As in plain torch."""
    _, optimizer = start(level)
    twin = copy.copy(optimizer)
    assert twin.param_groups is optimizer.param_groups and twin.state is optimizer.state


def test_two_models_and_one_optimizer():
    models = [build(0), build(1)]
    params = [param for model in models for param in model.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    ampatch.initialize(models, optimizer, opt_level="O2", verbosity=0)
    (first, second), copied = copy.deepcopy((models, optimizer))
    held = copied.param_groups[0]["params"]
    assert all(a is b for a, b in zip(held, [*first.parameters(), *second.parameters()]))


def test_the_copy_of_a_partly_frozen_model():
    model = build()
    model[0].requires_grad_(False)
    _, optimizer = start("O2", model=model, kind=torch.optim.SGD)
    for way in WAYS.values():
        copied, its_optimizer = way((model, optimizer))
        held = its_optimizer.param_groups[0]["params"]
        assert all(a is b for a, b in zip(held, copied.parameters(), strict=True))
        assert not copied[0].weight.requires_grad and copied[0].weight.dtype is torch.float32


def test_after_deactivate_pairs_are_copied_by_torch():
    model, optimizer = start("O2")
    ampatch.deactivate()
    assert not {"__deepcopy__", "__reduce_ex__"} & (set(vars(model)) | set(vars(optimizer)))
