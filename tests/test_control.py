"""Casting under the user's control."""

from __future__ import annotations

import sys
import threading
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch as amp

FP16, FP32 = torch.float16, torch.float32


@pytest.fixture
def model():
    """A small model, managed at O1 in float16."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4))
    amp.initialize(model, verbosity=0)
    return model


def mm_dtype():
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def test_disable_casts_nests_and_restores(model):
    assert mm_dtype() is FP16
    with amp.disable_casts():
        assert mm_dtype() is FP32
        with amp.disable_casts():
            assert mm_dtype() is FP32
        assert mm_dtype() is FP32, "leaving the inner block switched casting on"
        assert model(torch.ones(2, 4)).dtype is FP32, "the model's own policy won over the user"
    assert mm_dtype() is FP16


def test_disable_casts_survives_an_exception(model):
    with pytest.raises(KeyError), amp.disable_casts():
        raise KeyError
    assert mm_dtype() is FP16


def test_disable_casts_is_for_this_thread_only(model):
    seen = []
    with amp.disable_casts():
        thread = threading.Thread(target=lambda: seen.append(mm_dtype()))
        thread.start()
        thread.join()
        assert mm_dtype() is FP32
    assert seen == [FP16]


def test_disable_casts_as_a_decorator_even_recursive(model):
    @amp.disable_casts()
    def dtypes(depth):
        return [mm_dtype(), *(dtypes(depth - 1) if depth else [])]

    assert dtypes(2) == [FP32] * 3
    assert mm_dtype() is FP16


def test_precision(model):
    half = torch.ones(2, 2, dtype=FP16)
    with amp.precision("float"):
        assert torch.mm(half, half).dtype is FP32
        with amp.precision("half"):
            assert torch.exp(torch.ones(2)).dtype is FP16
        assert mm_dtype() is FP32
    with amp.precision("half"):
        assert torch.exp(torch.ones(2)).dtype is FP16
    assert torch.exp(half).dtype is FP32


def test_control_without_a_session_changes_nothing():
    with amp.disable_casts(), amp.precision("half"):
        assert mm_dtype() is FP32


class Functions:
    @amp.half_function
    def method(self, x):
        return x.dtype

    @staticmethod
    @amp.float_function
    def static(x, *, scale=None):
        return x.dtype, None if scale is None else scale.dtype


def test_decorated_functions_cast_only_while_a_session_is_open():
    @amp.promote_function
    def promoted(x, y):
        return x.dtype, y.dtype

    full, half = torch.ones(2), torch.ones(2, dtype=FP16)
    assert Functions().method(full) is FP32
    amp.initialize(nn.Linear(2, 2), verbosity=0)
    assert Functions().method(full) is FP16
    assert Functions.static(half, scale=half) == (FP32, FP32)
    assert promoted(full, half) == (FP32, FP32)
    assert promoted(half, half) == (FP16, FP16)
    assert Functions().method(torch.ones(2, dtype=torch.float64)) is torch.float64
    amp.deactivate()
    assert Functions().method(full) is FP32


@pytest.fixture
def library(monkeypatch):
    """A user's module with a function in it, and a registry without registrations."""
    module = types.ModuleType("users_library")
    module.function = module.other = lambda x: x.dtype
    monkeypatch.setitem(sys.modules, "users_library", module)
    monkeypatch.setattr(amp.session.registry, "_user_functions", [])
    return module


def test_registered_before_and_after_initialize(library):
    original, full = library.function, torch.ones(2)
    amp.register_half_function(library, "function")
    assert library.function is original, "nothing is patched before a session opens"
    amp.initialize(nn.Linear(2, 2), verbosity=0)
    assert library.function(full) is FP16
    amp.register_float_function("users_library.other")
    assert library.other(full.half()) is FP32
    amp.deactivate()
    assert library.function is original and library.other is original


def test_registered_before_its_module_is_imported(monkeypatch, tmp_path):
    monkeypatch.setattr(amp.session.registry, "_user_functions", [])
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "late_library.py").write_text("def function(x):\n    return x.dtype\n")
    amp.register_half_function("late_library.function")
    amp.initialize(nn.Linear(2, 2), verbosity=0)
    import late_library

    assert late_library.function(torch.ones(2)) is FP16
    amp.deactivate()
    assert late_library.function(torch.ones(2)) is FP32
    del sys.modules["late_library"]


@pytest.mark.parametrize("key", ["1", "1*", nn.Softmax])
def test_override_of_a_module_at_o1(key):
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4))
    seen = {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda m, a, out, name=name: seen.update({name: out.dtype}))
    amp.initialize(model, verbosity=0, overrides={key: "half"})
    model(torch.ones(2, 4))
    assert seen == {"0": FP16, "1": FP16, "2": FP16}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_override_to_float(level):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    amp.initialize(model, opt_level=level, verbosity=0, overrides={"1": "float"})
    inner = []
    model[1][0].register_forward_hook(lambda m, args, out: inner.append((args[0].dtype, out.dtype)))
    model(torch.ones(2, 4))
    assert inner == [(FP32, FP32)]
    assert model[1][0].weight.dtype is FP32
    assert model[0].weight.dtype is (FP32 if level == "O1" else FP16)


def test_override_of_functions_listed_and_not():
    ones = torch.ones(1, 2, 2)
    amp.initialize(nn.Linear(2, 2), verbosity=0, overrides={torch.bmm: "float", torch.relu: "half"})
    assert torch.bmm(ones.half(), ones.half()).dtype is FP32
    assert torch.relu(ones).dtype is FP16
    assert torch.matmul(ones, ones).dtype is FP16
    amp.deactivate()
    assert torch.relu(ones).dtype is FP32


def test_scope_model_leaves_other_models_alone():
    torch.manual_seed(0)
    managed, other = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    inputs = torch.randn(3, 4)
    expected = other(inputs)
    amp.initialize(managed, verbosity=0, patch_scope="model")
    assert torch.equal(other(inputs), expected) and other(inputs).dtype is FP32
    output = managed(inputs)
    assert output.dtype is FP16
    assert F.mse_loss(output, inputs.half()).dtype is FP32, "a loss on half outputs is cast"
    assert F.linear(inputs, managed.weight).dtype is FP16, "a managed parameter brings the rules"
    assert mm_dtype() is FP32


def test_models_at_other_levels_are_free_of_o1s_rules():
    first, plain = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    expected = plain(torch.ones(2, 4))
    amp.initialize(plain, opt_level="O0", verbosity=0)
    amp.initialize(first, opt_level="O1", verbosity=0)
    assert first(torch.ones(2, 4)).dtype is FP16
    assert torch.equal(plain(torch.ones(2, 4)), expected)
