"""Copies and averages of managed models: plain, and of the weights as they are."""

from __future__ import annotations

import copy
import functools
import io
import pickle

import pytest
import torch
from small_training import dtypes, managed
from small_training import train_with_norms as train
from small_training import with_norms as build
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import ampatch


def start(level, dtype=torch.float16, **settings):
    sgd = functools.partial(torch.optim.SGD, momentum=0.9)
    return managed(build(), level, dtype, sgd, **settings)


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "torch.save": through_torch_save,
    "AveragedModel": lambda model: AveragedModel(model).module,
    "unwrap": ampatch.unwrap,
    "in a list": lambda model: copy.deepcopy([model])[0],
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_are_plain_models_of_the_same_weights(opt_level, how):
    """In FP32, at O3 in half: what there is."""
    model, optimizer = start(opt_level)
    train(model, optimizer)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    copied = COPIES[how](model)
    assert type(copied) is nn.Sequential and copied is not model
    for plain, reference in zip(copied.modules(), build().modules(), strict=True):
        assert hooks_of(plain) == hooks_of(reference)
        assert set(vars(plain)) == set(vars(reference))
    found = copied.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert dtypes(copied) == dtypes(model)
    is_half = torch.float16 in set(dtypes(copied).values())
    assert is_half is (opt_level == "O3")
    managed = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
    assert not managed & {t.data_ptr() for t in copied.parameters()}
    ampatch.deactivate()
    x = torch.randn(4, 3)
    ours = copied.float().eval()(x)
    assert torch.equal(ours, model.eval()(x))


@pytest.mark.parametrize("how", [copy.deepcopy, through_pickle, through_torch_save])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_copied_part_no_longer_knows_the_model(how, level):
    """Its weights are what the part's are, and its `state_dict` is its own."""
    model, _ = start(level)
    kind = torch.float32 if level == "O2" else torch.float16
    part = how(model[3])
    assert type(part) is nn.Linear and torch.equal(part.weight, model[3].weight)
    before = model[3].weight.detach().clone()
    with torch.no_grad():
        part.weight.fill_(2.0)
    assert torch.equal(part.state_dict()["weight"], torch.full((2, 4), 2.0, dtype=kind))
    part.load_state_dict(build(3)[3].state_dict())
    assert torch.equal(model[3].weight, before)
    assert part(torch.ones(1, 4, dtype=kind)).dtype is kind  # half where the model casts none
    ampatch.deactivate()
    assert part(torch.ones(1, 4, dtype=kind)).dtype is kind


def hooks_of(module):
    return {
        name: len(table)
        for name, table in vars(module).items()
        if "hook" in name and hasattr(table, "__len__")
    }


# Averages

DECAY = 0.75

AVERAGES = {
    "running mean": {},
    "EMA": {"multi_avg_fn": get_ema_multi_avg_fn(DECAY)},
    "with buffers": {"multi_avg_fn": get_ema_multi_avg_fn(DECAY), "use_buffers": True},
    "function": {"avg_fn": lambda average, value, count: average.lerp(value, 1 - DECAY)},
}


def average(values, kind):
    """What is to come out, in float64: the plain mean, or an EMA from the first value."""
    values = [value.double() for value in values]
    if kind == "running mean":
        return torch.stack(values).mean(0)
    result = values[0]
    for value in values[1:]:
        result = DECAY * result + (1 - DECAY) * value
    return result


@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_averaged_model_averages_float_values(kind, level, half):
    model, optimizer = start(level, half)
    averaged = AveragedModel(model, **AVERAGES[kind])
    seen = []
    for _ in range(4):
        train(model, optimizer, steps=1)
        averaged.update_parameters(model)
        seen.append([p.detach().clone() for p in ampatch.master_params(optimizer)])
    found = [param.detach() for param in averaged.module.parameters()]
    assert {param.dtype for param in found} == {torch.float32}
    expected = [average(values, kind) for values in zip(*seen, strict=True)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-6, rtol=1e-6)
    for ours, theirs in zip(averaged.module.buffers(), model.buffers(), strict=True):
        if kind != "with buffers":
            assert torch.equal(ours, theirs)


def test_update_bn_of_the_average_and_of_the_model(opt_level):
    """The statistics become those of the loader's data, as in FP32; an average of O3 is half."""
    loader = [torch.randn(16, 3, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    model, optimizer = start(opt_level, torch.bfloat16)
    train(model, optimizer)
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    plain = copy.deepcopy(model).float()
    update_bn(loader, model)
    update_bn([x.to(averaged.module[0].weight.dtype) for x in loader], averaged)
    ampatch.deactivate()
    update_bn(loader, plain)
    for found in (model, averaged.module):
        for name in ("running_mean", "running_var"):
            ours, theirs = getattr(found[1], name), getattr(plain[1], name)
            torch.testing.assert_close(ours.float(), theirs, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("how", ["load_state_dict", "data", "copy_"])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_swapping_an_average_in_and_out_loses_nothing(how, level, half):
    """Evaluate with other weights, then train on: the weights are what they were, to the bit."""
    model, optimizer = start(level, half)
    train(model, optimizer)
    other = build(seed=9)
    x = torch.randn(4, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = [param.detach().clone() for param in model.parameters()]
    put(how, model, other.state_dict(), other.parameters())
    other[1].load_state_dict(model[1].state_dict())
    assert torch.allclose(model.eval()(x), other.eval()(x), atol=0.05)
    put(how, model, before, weights)
    if how == "load_state_dict":
        assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(map(torch.equal, weights, model.parameters()))
    optimizer.zero_grad()
    optimizer.step()  # without gradients it only settles
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) or "running" in name or "num" in name, name


def put(how, model, state, weights):
    if how == "load_state_dict":
        model.load_state_dict(state)
    elif how == "data":
        for param, value in zip(model.parameters(), weights, strict=True):
            param.data.copy_(value.data)
    else:
        with torch.no_grad():
            for param, value in zip(model.parameters(), weights, strict=True):
                param.copy_(value)
