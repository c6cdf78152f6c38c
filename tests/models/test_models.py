"""O2 and O3: how a model is converted, what its `state_dict` holds, and that writes count."""

from __future__ import annotations

import functools

import pytest
import torch
from small_training import dtypes, managed
from small_training import train_with_norms as train
from small_training import with_norms as build
from torch import nn

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


# Conversion


@pytest.mark.parametrize(
    "level, keep", [("O2", None), ("O2", True), ("O2", False), ("O3", True), ("O3", "True")]
)
def test_batchnorm_stays_float(level, keep, half):
    """At O2 in any case: its statistics are FP32, and its kernels want weights in their dtype."""
    model, _ = start(level, half, keep_batchnorm_fp32=keep)
    outside, inside = dtypes(model), dtypes_inside(model)
    for found in (outside, inside):
        assert found.pop("1.num_batches_tracked") is torch.int64
    for name, dtype in inside.items():
        assert dtype is (torch.float32 if name in NORMS | FLOAT else half), name
    if level == "O2":
        assert set(outside.values()) == {torch.float32}
    else:
        assert outside == inside


def test_that_batchnorm_stays_float_is_said(caplog):
    caplog.set_level("INFO", "ampatch")
    ampatch.initialize(build(), opt_level="O2", keep_batchnorm_fp32=False)
    assert "keep_batchnorm_fp32=False has no effect" in caplog.text
    caplog.clear()
    ampatch.initialize(build(), opt_level="O2", keep_batchnorm_fp32=False, master_weights=False)
    assert "has no effect" not in caplog.text


@pytest.mark.parametrize(
    "level, settings",
    [
        ("O3", {}),
        ("O3", {"keep_batchnorm_fp32": False}),
        ("O2", {"keep_batchnorm_fp32": "False", "master_weights": False}),
    ],
)
def test_all_is_half(level, settings, half):
    model, _ = start(level, half, **settings)
    found = dtypes(model)
    assert found.pop("1.num_batches_tracked") is torch.int64
    assert found.pop("offset") is torch.float32
    assert set(found.values()) == {half}


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_o0_and_o1_keep_float_weights(level):
    model, _ = start(level)
    found = dtypes(model)
    del found["1.num_batches_tracked"]
    assert set(found.values()) == {torch.float32}


def test_parameters_and_buffers_stay_the_same_objects(opt_level):
    model = build()
    before = [*model.parameters(), *model.buffers()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    returned = ampatch.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    train(model, optimizer)
    assert returned[0] is model and returned[1] is optimizer and optimizer.param_groups[0] is group
    assert all(a is b for a, b in zip(before, [*model.parameters(), *model.buffers()], strict=True))


def test_the_forward_sees_the_rounded_float_weights(half):
    plain, (model, optimizer) = build(), start("O2", half)
    seen = {}

    def note(*call):
        seen.update({name: one.detach().clone() for name, one in model.named_parameters()})

    model[0].register_forward_hook(note)
    model(torch.randn(8, 3))
    for name, theirs in plain.named_parameters():
        assert torch.equal(seen[name], theirs.to(theirs.dtype if name in NORMS else half)), name
    ours = zip(ampatch.master_params(optimizer), model.parameters(), strict=True)
    assert all(master is parameter for master, parameter in ours)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


# state_dict


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_state_dict_is_what_there_is(level, half):
    """The model's own tensors: FP32 at O2, half at O3."""
    model, optimizer = start(level, half)
    train(model, optimizer)
    state = model.state_dict()
    assert list(state) == list(build().state_dict())
    own = dict((*model.named_parameters(), *model.named_buffers()))
    assert {name: value.data_ptr() for name, value in state.items()} == {
        name: own[name].data_ptr() for name in state
    }
    found = {value.dtype for name, value in state.items() if name not in FLOAT}
    assert found == {torch.float32 if level == "O2" else half, torch.int64}
    plain = build()
    plain.load_state_dict(state)  # a plain script reads it
    assert torch.equal(plain[0].weight, model[0].weight.float())


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
