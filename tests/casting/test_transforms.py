"""Managed models in torch.func, forward-mode AD, dispatch modes, and of tensor subclasses."""

import contextlib

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from small_training import Made, same
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import functional
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.testing._internal.two_tensor import TwoTensor

import ampatch

H, FP32 = torch.bfloat16, torch.float32
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def network():
    """A layer used twice and a softmax; output (n, 4)."""
    torch.manual_seed(0)
    return Made(
        lambda self, x: torch.softmax(self.layer(self.norm(torch.tanh(self.layer(x)))), -1),
        layer=nn.Linear(4, 4),
        norm=nn.LayerNorm(4),
    )


def managed(level):
    return ampatch.initialize(network(), opt_level=level, dtype=H, verbosity=0)


def by_hand(level):
    """The function a managed model is, written with casts where the level has them."""
    net, half = network(), FP32 if level == "O0" else H

    def cast(tensor):
        return tensor.to(half)

    weight, bias = cast(net.layer.weight), cast(net.layer.bias)
    inner = H if level in ("O2", "O3") else FP32
    scale, shift = net.norm.weight.to(inner), net.norm.bias.to(inner)

    def function(x):
        y = torch.tanh(torch.nn.functional.linear(cast(x), weight, bias))
        # On the CPU the sums of LayerNorm's gradients are FP32 at all levels.
        y = y.to(inner).float()
        y = torch.nn.functional.layer_norm(y, (4,), scale.float(), shift.float()).to(inner)
        y = torch.nn.functional.linear(cast(y), weight, bias)
        return torch.softmax(y.to(inner), -1).float()

    return function


def first(function):
    return lambda x: function(x)[..., 0].sum()


TRANSFORMS = {
    "vmap": lambda f: vmap(f)(X),
    "vmap of columns": lambda f: vmap(f, in_dims=1, out_dims=1)(X.unsqueeze(0))[0],
    "grad": lambda f: grad(first(f))(X),
    "per sample": lambda f: vmap(grad(first(f)))(X),
    "jvp": lambda f: torch.cat(jvp(f, (X,), (torch.ones_like(X),))),
    "jacrev": lambda f: jacrev(f)(X),
    "jacfwd": lambda f: jacfwd(f)(X),
    "hessian": lambda f: hessian(first(f))(X),
    "vjp": lambda f: torch.func.vjp(f, X)[1](torch.ones_like(X))[0],
    "linearize": lambda f: torch.func.linearize(f, X)[1](torch.ones_like(X)),
    "autograd jacobian": lambda f: functional.jacobian(f, X),
    "autograd vectorized": lambda f: functional.jacobian(f, X, vectorize=True),
    "autograd hessian": lambda f: functional.hessian(first(f), X),
    "autograd jvp": lambda f: functional.jvp(f, X, torch.ones_like(X))[1],
    "autograd hvp": lambda f: functional.hvp(first(f), X, torch.ones_like(X))[1],
    "forward mode": lambda f: forward_mode(f),
}


def forward_mode(function):
    with forward_ad.dual_level():
        dual = function(forward_ad.make_dual(X, torch.ones_like(X)))
        return torch.stack(tuple(forward_ad.unpack_dual(dual)))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own use
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's linearize
def test_a_transform_of_a_managed_model(opt_level, caplog):
    """As that of the same function with its casts written out; nothing of it is kept."""
    expected = {name: transform(by_hand(opt_level)) for name, transform in TRANSFORMS.items()}
    model = ampatch.initialize(network(), opt_level=opt_level, dtype=H)
    plain = model(X)
    for name, transform in TRANSFORMS.items():
        result = transform(model)
        assert result.dtype is expected[name].dtype is FP32
        assert torch.equal(result, expected[name]), name
        assert torch.equal(model(X), plain) and ampatch.cache_info().entries == 0
    assert "TorchScript" not in caplog.text


def test_functional_call(opt_level):
    """Gradients come in the dtypes of the weights that were handed in."""
    model = managed(opt_level)
    weights = {name: 2 * value.detach() for name, value in model.named_parameters()}

    def loss(weights):
        return functional_call(model, weights, (X,))[:, 0].sum()

    grads = grad(loss)(weights)
    before = model(X)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(2)
    model(X)[:, 0].sum().backward()
    for name, value in model.named_parameters():
        assert grads[name].dtype is value.dtype
        # At O1 the model casts its layer once for both calls and sums in half.
        rounding = {"rtol": 0.01, "atol": 0.01} if opt_level == "O1" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(grads[name], value.grad, **rounding)
    assert not torch.equal(model(X), before)


def test_an_ensemble(opt_level):
    models = [managed(opt_level) for _ in range(2)]
    with torch.no_grad():
        models[1].layer.weight.mul_(2)
    weights, buffers = torch.func.stack_module_state(models)

    def call(weights, buffers):
        return functional_call(models[0], (weights, buffers), (X,))

    result = vmap(call)(weights, buffers)
    expected = torch.stack([model(X) for model in models])
    assert result.dtype is expected.dtype
    torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02)


def managed_by_name(level):
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
    model = managed_by_name(opt_level)
    assert same(model(X.as_subclass(Silent)), model(X))


def test_a_dispatch_subclass(opt_level):
    """Both halves of a pair are cast, and gradients reach both."""
    model = managed_by_name(opt_level)
    x = TwoTensor(X, 2 * X).requires_grad_()
    output = model(x)
    assert all(type(tensor) is TwoTensor for tensor in output)
    assert same([tensor.a for tensor in output], model(X))
    assert same([tensor.b for tensor in output], model(2 * X))
    output[0][:, 0].float().sum().backward()
    assert type(x.grad) is TwoTensor and x.grad.dtype is FP32


def test_fake_tensors(opt_level):
    """Dtypes and shapes without computing; the real model is untouched by it."""
    model = managed_by_name(opt_level)
    reference = model(X)
    with FakeTensorMode(allow_non_fake_inputs=True):
        output = model(torch.randn(3, 4))
    for fake, real in zip(output, reference, strict=True):
        assert fake.dtype is real.dtype and fake.shape == real.shape
    assert same(model(X), reference), "no fake copy of a weight was kept"
    ampatch.deactivate()
    with FakeTensorMode():
        model = managed_by_name(opt_level)
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
    reference = [tensor.dtype for tensor in managed_by_name(opt_level)(X)]
    ampatch.deactivate()
    for device in (torch.device("meta"), default_device()):
        with device:
            output = managed_by_name(opt_level)(torch.ones(3, 4))
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
