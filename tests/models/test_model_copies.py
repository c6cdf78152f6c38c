"""Copies of managed models: plain, and of the weights as they are.

Averages, and what copies compute and train: tests/laws/test_float_weights.py.
"""

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
from torch.optim.swa_utils import AveragedModel

import ampatch


def start(level, dtype=torch.float16):
    sgd = functools.partial(torch.optim.SGD, momentum=0.9)
    return managed(build(), level, dtype, sgd)


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def hooks_of(module):
    return {
        name: len(table)
        for name, table in vars(module).items()
        if "hook" in name and hasattr(table, "__len__")
    }


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "pickle, protocol 0": lambda model: pickle.loads(pickle.dumps(model, 0)),
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
        assert set(vars(plain)) == set(vars(reference)) and type(plain.__dict__) is dict
    found = copied.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert dtypes(copied) == dtypes(model)
    is_half = torch.float16 in set(dtypes(copied).values())
    assert is_half is (opt_level == "O3")
    own = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
    assert not own & {t.data_ptr() for t in copied.parameters()}
    ampatch.deactivate()
    x = torch.randn(4, 3)
    assert torch.equal(copied.float().eval()(x), model.eval()(x))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_copied_part_no_longer_knows_the_model(how, level):
    """Its weights are what the part's are, and its `state_dict` is its own."""
    model, _ = start(level)
    kind = torch.float32 if level == "O2" else torch.float16
    part = COPIES[how](model[3])
    assert type(part) is nn.Linear and torch.equal(part.weight, model[3].weight)
    before = model[3].weight.detach().clone()
    with torch.no_grad():
        part.weight.fill_(2.0)
    assert torch.equal(part.state_dict()["weight"], torch.full((2, 4), 2.0, dtype=kind))
    part.load_state_dict(build(3)[3].state_dict())
    assert torch.equal(model[3].weight, before)
    for _ in range(2):
        assert part(torch.ones(1, 4, dtype=kind)).dtype is kind  # half where the model casts none
        ampatch.deactivate()
