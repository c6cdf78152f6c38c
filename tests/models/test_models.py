"""O2 and O3: which weights, buffers and calls are half.  Copies of models at all levels: plain."""

import copy
import functools
import pickle

import pytest
import torch
from small_training import dtypes, managed
from small_training import train_with_norms as train
from small_training import with_norms as build
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ampatch

NORMS = {"1.weight", "1.bias", "1.running_mean", "1.running_var"}
FLOAT = {"offset"}  # buffers of the user's stay in FP32, as under autocast


def start(level, dtype=torch.float16, **settings):
    sgd = functools.partial(torch.optim.SGD, momentum=0.9)
    return managed(build(), level, dtype, sgd, **settings)


def dtypes_inside(model):
    """As the model's forward sees them."""
    seen = {}
    handle = model[0].register_forward_hook(lambda *call: seen.update(dtypes(model)))
    model(torch.randn(8, 3))
    handle.remove()
    return seen


@pytest.mark.parametrize("keep", [None, True, "True", False, "False"])
@pytest.mark.parametrize("level, copies", [("O2", True), ("O2", False), ("O3", False)])
def test_which_tensors_are_half(level, copies, keep, half):
    """Beside half copies norms are FP32 in any case: their kernels want one dtype."""
    settings = {} if copies or level == "O3" else {"master_weights": False}
    model, _ = start(level, half, keep_batchnorm_fp32=keep, **settings)
    stays = copies or keep in (True, "True") or (level == "O2" and keep is None)
    outside, inside = dtypes(model), dtypes_inside(model)
    for found in (outside, inside):
        assert found.pop("1.num_batches_tracked") is torch.int64
    for name, dtype in inside.items():
        is_float = name in FLOAT or (stays and name in NORMS)
        assert dtype is (torch.float32 if is_float else half), name
    assert set(outside.values()) == {torch.float32} if copies else outside == inside


def test_that_batchnorm_stays_float_is_said(caplog):
    caplog.set_level("INFO", "ampatch")
    ampatch.initialize(build(), opt_level="O2", keep_batchnorm_fp32=False)
    assert "keep_batchnorm_fp32=False has no effect" in caplog.text
    caplog.clear()
    ampatch.initialize(build(), opt_level="O2", keep_batchnorm_fp32=False, master_weights=False)
    assert "has no effect" not in caplog.text


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_of_a_half_model_with_fp32_buffers_only_mixed_calls_are_cast(level, half):
    """Angles that are made of FP32 buffers alone stay exact; what is half throughout stays half."""
    seen = {}

    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("places", torch.arange(4096.0)[:, None])
            self.register_buffer("frequencies", torch.logspace(0, -4, 8)[None])

        def forward(self, x):
            seen["angles"] = self.places @ self.frequencies
            seen["half"] = torch.softmax(self.layer(x), -1)
            return self.layer(x) @ seen["angles"][:8].cos()

    model = Rotary()
    ampatch.initialize(model, opt_level=level, dtype=half, verbosity=0)
    model(torch.ones(2, 8))
    assert torch.equal(seen["angles"], model.places @ model.frequencies)
    assert seen["angles"].dtype is torch.float32 and seen["half"].dtype is half


# Copies; averages and what copies train: situations of laws; files: tests/session/test_copies.py


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
    state = copied.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert dtypes(copied) == dtypes(model)
    assert (torch.float16 in set(dtypes(copied).values())) is (opt_level == "O3")
    own = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
    assert not own & {t.data_ptr() for t in copied.parameters()}
    ampatch.deactivate()
    x = torch.randn(4, 3)
    assert torch.equal(copied.float().eval()(x), model.eval()(x))
