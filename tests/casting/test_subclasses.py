"""Managed models with tensor subclasses, dispatch modes, fake tensors and default devices."""

import contextlib

import torch
import torch.nn.functional as F
from small_training import Made, same
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import ampatch

X = torch.randn(3, 4)
H, FP32 = torch.bfloat16, torch.float32


def managed(level):
    """Functions by module, by name and as methods."""

    def forward(self, x):
        y = F.relu(self.norm(self.layer(x)))
        return torch.softmax(y.matmul(y.transpose(0, 1)), -1), y

    torch.manual_seed(0)
    model = Made(forward, layer=nn.Linear(4, 4), norm=nn.LayerNorm(4))
    return ampatch.initialize(model, opt_level=level, dtype=H, verbosity=0)


class Silent(torch.Tensor):
    """Asks not to be told of calls."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def test_a_subclass_that_wants_no_calls(opt_level):
    model = managed(opt_level)
    assert same(model(X.as_subclass(Silent)), model(X))


def test_a_dispatch_subclass(opt_level):
    """Both halves of a pair are cast, and gradients reach both."""
    model = managed(opt_level)
    x = TwoTensor(X, 2 * X).requires_grad_()
    output = model(x)
    assert all(type(tensor) is TwoTensor for tensor in output)
    assert same([tensor.a for tensor in output], model(X))
    assert same([tensor.b for tensor in output], model(2 * X))
    output[0][:, 0].float().sum().backward()
    assert type(x.grad) is TwoTensor and x.grad.dtype is FP32


def test_fake_tensors(opt_level):
    """Dtypes and shapes without computing; the real model is untouched by it."""
    model = managed(opt_level)
    reference = model(X)
    with FakeTensorMode(allow_non_fake_inputs=True):
        output = model(torch.randn(3, 4))
    for fake, real in zip(output, reference, strict=True):
        assert fake.dtype is real.dtype and fake.shape == real.shape
    assert same(model(X), reference), "no fake copy of a weight was kept"
    ampatch.deactivate()
    with FakeTensorMode():
        model = managed(opt_level)
        output = model(torch.randn(3, 4))
        output[0].float().sum().backward()
        assert [tensor.dtype for tensor in output] == [real.dtype for real in reference]
        assert model.layer.weight.grad.dtype is model.layer.weight.dtype
        ampatch.deactivate()
        assert model.layer.weight.dtype is FP32


@contextlib.contextmanager
def default_device():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def test_a_default_device(opt_level):
    """`torch.device(...)` as a context, and `set_default_device`, are modes of torch's own."""
    reference = [tensor.dtype for tensor in managed(opt_level)(X)]
    ampatch.deactivate()
    for device in (torch.device("meta"), default_device()):
        with device:
            output = managed(opt_level)(torch.ones(3, 4))
            assert [tensor.dtype for tensor in output] == reference
            assert {tensor.device.type for tensor in output} == {"meta"}
            ampatch.deactivate()


class Absent:
    """Stands for a package that is not installed."""

    def __getattr__(self, name):
        raise ImportError("No module named 'cupy'")

    def __eq__(self, other):
        raise RuntimeError("unbound")

    __hash__ = None


class AbsentTable(dict):
    def __contains__(self, key):
        raise RuntimeError("unbound")

    __len__ = __iter__ = values = __getitem__ = __contains__


absent, absent_table, absent_list = Absent(), AbsentTable(), [Absent()]


def reaches(args):
    return absent.asarray(args), absent_table, absent_list


class Reaching(torch.Tensor):
    """Its handler refers to what raises at any look, as MONAI's MetaTensor does."""

    kept = Absent()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return reaches(args) if result is NotImplemented else result


def test_looking_into_a_handler_runs_no_code_of_what_it_refers_to(opt_level):
    model = ampatch.initialize(nn.Linear(4, 4), opt_level=opt_level, dtype="bfloat16", verbosity=0)
    assert model(torch.ones(2, 4).as_subclass(Reaching)).shape == (2, 4)
