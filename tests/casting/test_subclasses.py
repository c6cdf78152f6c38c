"""Tensor subclasses and modes, with `__torch_function__` and `__torch_dispatch__`; fake tensors."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import ampatch

X = torch.randn(3, 4)
H, FP32 = torch.bfloat16, torch.float32
LEVELS = ["O0", "O1", "O2", "O3"]


class Net(nn.Module):
    """Functions by module, by name and as methods."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        y = F.relu(self.norm(self.layer(x)))
        return torch.softmax(y.matmul(y.transpose(0, 1)), -1), y


def managed(level):
    return ampatch.initialize(Net(), opt_level=level, dtype=H, verbosity=0)


def plain(output):
    return [tensor.as_subclass(torch.Tensor) for tensor in output]


def same(found, expected) -> bool:
    return all(
        a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )


class Recording(torch.Tensor):
    """Keeps the functions it was called with."""

    seen: ClassVar[list] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


class Recorder(TorchFunctionMode):
    """Keeps the functions called while it is on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


# What the casts at the ends of a half model look at in a subclass, and call on it.
ADDED = {"__get__", "to", "is_floating_point", "is_inference", "data_ptr", "_version"}


def calls(functions) -> list:
    """The functions but for those, by the names that torch has for them now."""
    places = (F, torch, torch.Tensor)
    return [
        next((p.__name__, f.__name__) for p in places if getattr(p, f.__name__, None) is f)
        for f in functions
        if f.__name__ not in ADDED
    ]


@pytest.mark.parametrize("level", LEVELS)
def test_a_subclass_sees_the_calls_it_would_see_without_us(level):
    x = X.as_subclass(Recording)
    Recording.seen.clear()
    Net()(x)
    expected = calls(Recording.seen)
    model = managed(level)
    reference = model(X)
    Recording.seen.clear()
    output = model(x)
    found = calls(Recording.seen)
    assert len(expected) == 6 and found == expected
    assert all(type(tensor) is Recording for tensor in output)
    assert same(plain(output), reference)


@pytest.mark.parametrize("level", LEVELS)
def test_a_mode_sees_the_calls_it_would_see_without_us(level):
    net = Net()
    with Recorder() as recorder:
        net(X)
    expected = calls(recorder.seen)
    model = managed(level)
    with Recorder() as recorder:
        output = model(X)
    assert len(expected) == 6 and calls(recorder.seen) == expected
    assert same(output, model(X))


class Silent(torch.Tensor):
    """Asks not to be told of calls."""

    __torch_function__ = torch._C._disabled_torch_function_impl


@pytest.mark.parametrize("level", LEVELS)
def test_a_subclass_that_wants_no_calls(level):
    model = managed(level)
    assert same(model(X.as_subclass(Silent)), model(X))


class Dispatched(TorchDispatchMode):
    """Keeps the operators that reach the dispatcher."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append((function, [a.dtype for a in args if isinstance(a, torch.Tensor)]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("level", LEVELS)
def test_a_dispatch_mode_sees_the_casts(level):
    model = managed(level)
    with Dispatched() as dispatched:
        output = model(X)
    assert same(output, model(X))
    (dtypes,) = (seen for f, seen in dispatched.seen if f is torch.ops.aten.addmm.default)
    assert set(dtypes) == {FP32 if level == "O0" else H}


@pytest.mark.parametrize("level", LEVELS)
def test_a_dispatch_subclass(level):
    """Both halves of a pair are cast, and gradients reach both."""
    model = managed(level)
    x = TwoTensor(X, 2 * X).requires_grad_()
    output = model(x)
    assert all(type(tensor) is TwoTensor for tensor in output)
    assert same([tensor.a for tensor in output], model(X))
    assert same([tensor.b for tensor in output], model(2 * X))
    output[0][:, 0].float().sum().backward()
    assert type(x.grad) is TwoTensor and x.grad.dtype is FP32


# Fake tensors and devices


@pytest.mark.parametrize("level", LEVELS)
def test_fake_tensors(level):
    """Dtypes and shapes without computing; the real model is untouched by it."""
    model = managed(level)
    reference = model(X)
    with FakeTensorMode(allow_non_fake_inputs=True):
        output = model(torch.randn(3, 4))
    for fake, real in zip(output, reference, strict=True):
        assert fake.dtype is real.dtype and fake.shape == real.shape
    assert same(model(X), reference), "no fake copy of a weight was kept"
    ampatch.deactivate()
    with FakeTensorMode():
        model = managed(level)
        output = model(torch.randn(3, 4))
        output[0].float().sum().backward()
        assert [tensor.dtype for tensor in output] == [real.dtype for real in reference]
        assert model.layer.weight.grad.dtype is model.layer.weight.dtype
        ampatch.deactivate()
        assert model.layer.weight.dtype is FP32


@pytest.mark.parametrize("how", ["context", "default"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_default_device(level, how):
    """`torch.device(...)` as a context, and `set_default_device`, are modes of torch's own."""
    reference = [tensor.dtype for tensor in managed(level)(X)]
    ampatch.deactivate()

    def run():
        model = managed(level)
        output = model(torch.ones(3, 4))
        assert [tensor.dtype for tensor in output] == reference
        assert {tensor.device.type for tensor in output} == {"meta"}
        ampatch.deactivate()

    if how == "context":
        with torch.device("meta"):
            run()
        return
    torch.set_default_device("meta")
    try:
        run()
    finally:
        torch.set_default_device(None)
