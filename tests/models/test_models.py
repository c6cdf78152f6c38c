"""O2 and O3: which weights, buffers and calls are half."""

from __future__ import annotations

import functools

import pytest
import torch
from small_training import dtypes, managed
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
