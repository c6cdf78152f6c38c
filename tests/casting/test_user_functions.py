"""The user's own functions: decorators and registrations, methods and autograd Functions."""

import inspect
import sys
import types

import pytest
import torch
from registrations import forgotten_afterwards
from small_training import in_threads
from torch import nn
from torch.autograd import Function

import ampatch

X = torch.randn(4, 4)
H = torch.bfloat16


def o1():
    ampatch.initialize([], dtype=H, patch_scope="process", verbosity=0)


DECORATORS = {
    ampatch.half_function: (H, H, torch.float64),
    ampatch.float_function: (torch.float32, torch.float32, torch.float64),
    ampatch.promote_function: (torch.float32, torch.float32, torch.float64),
}


@pytest.mark.parametrize("decorate", DECORATORS, ids=lambda function: function.__name__)
def test_decorators(decorate):
    @decorate
    def probe(a, b, *, c):
        return a.dtype, b.dtype, c.dtype

    arguments = (X, X.to(H))
    plain = (torch.float32, H, torch.float64)
    assert probe(*arguments, c=X.double()) == plain
    o1()
    assert probe(*arguments, c=X.double()) == DECORATORS[decorate]
    with ampatch.disable_casts():
        assert probe(*arguments, c=X.double()) == plain
    ampatch.deactivate()
    assert probe(*arguments, c=X.double()) == plain


@pytest.fixture
def library(monkeypatch):
    """A module of the user's; what is registered in it is forgotten afterwards."""
    module = types.ModuleType("users_library")
    module.dtype_of = lambda x: x.dtype
    monkeypatch.setitem(sys.modules, "users_library", module)
    with forgotten_afterwards():
        yield module
        ampatch.deactivate()


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("dotted", [True, False])
def test_registered_functions(library, early, dotted, monkeypatch):
    """A name that another module imported is rebound too."""
    other, original = types.ModuleType("users_other_library"), library.dtype_of
    other.short = original
    monkeypatch.setitem(sys.modules, other.__name__, other)
    place = ("users_library.dtype_of",) if dotted else (library, "dtype_of")
    if early:
        ampatch.register_half_function(*place)
        assert library.dtype_of(X) is torch.float32
    o1()
    if not early:
        ampatch.register_half_function(*place)
    assert library.dtype_of(X) is H and other.short(X) is H
    ampatch.deactivate()
    assert library.dtype_of is other.short is original
    o1()
    assert library.dtype_of(X) is H


def test_registered_rules(library):
    library.promoted = lambda a, b: (a.dtype, b.dtype)
    ampatch.register_float_function(library, "dtype_of")
    ampatch.register_promote_function("users_library.promoted")
    o1()
    assert library.dtype_of(X.to(H)) is torch.float32
    assert library.promoted(X, X.to(H)) == (torch.float32, torch.float32)
    assert library.promoted(X.to(H), X.to(H)) == (H, H)
    ampatch.register_half_function(library, "dtype_of")
    assert library.dtype_of(X) is H


class Softmax(nn.Linear):
    """The rule of Tensor.softmax, which F.softmax calls, is FP32."""

    def forward(self, x):
        return torch.nn.functional.softmax(super().forward(x), -1)


@pytest.mark.parametrize("how", ["registered", "override"])
def test_what_names_a_function_of_torch_holds_in_a_compiled_graph(library, how):
    overrides = {torch.nn.functional.softmax: "half"} if how == "override" else None
    if how == "registered":
        ampatch.register_half_function(torch.nn.functional, "softmax")
    model = ampatch.initialize(Softmax(4, 4), dtype=H, overrides=overrides, verbosity=0)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert model(X).dtype is compiled(X).dtype is H


def test_a_registration_stands_above_an_override(library):
    ampatch.register_float_function(torch.Tensor, "relu")
    overrides = {torch.Tensor.relu: "half"}
    ampatch.initialize([], dtype=H, patch_scope="process", verbosity=0, overrides=overrides)
    assert X.relu().dtype is X.to(H).relu().dtype is torch.float32


@pytest.mark.parametrize(
    "place, error, said",
    [
        (("users_library", "absent"), AttributeError, "users_library has no attribute 'absent'"),
        (("late.name.dtype_of",), ValueError, "late.name is not imported. Import it before"),
        (("late.name", "dtype_of"), ValueError, "late.name is not imported. Import it before"),
        (("users_library", "Wrong"), TypeError, "register_half_function.*Linear is a class"),
    ],
)
def test_what_cannot_be_registered_is_an_error_and_registers_nothing(library, place, error, said):
    library.Wrong = nn.Linear
    with pytest.raises(error, match=said):
        ampatch.register_half_function(*place)
    if "late" in place[0]:
        with pytest.raises(ValueError, match="unregister_function: late.name is not imported"):
            ampatch.unregister_function(*place)
    o1()
    assert library.Wrong is nn.Linear


def test_a_decorated_function_keeps_its_name_and_signature():
    @ampatch.half_function
    def attention(query, *, scale=1.0):
        """What it does."""

    assert (attention.__name__, attention.__doc__) == ("attention", "What it does.")
    assert list(inspect.signature(attention).parameters) == ["query", "scale"]


class Methods:
    """Methods of each kind, decorated on either side of the method's own decorator, and plain."""

    @ampatch.half_function
    def of_object(self, x):
        assert isinstance(self, Methods)
        return x.dtype

    @staticmethod
    @ampatch.half_function
    def static_below(x):
        return x.dtype

    @ampatch.half_function
    @staticmethod
    def static_above(x):
        return x.dtype

    @ampatch.half_function
    @classmethod
    def of_class(cls, x):
        assert cls is Methods
        return x.dtype

    def plain(self, x):
        assert isinstance(self, Methods)
        return x.dtype

    @staticmethod
    def plain_static(x):
        return x.dtype

    @classmethod
    def plain_of_class(cls, x):
        assert cls is Methods
        return x.dtype


def test_decorated_methods():
    names = ("static_below", "static_above", "of_class")
    for dtype in (torch.float32, H):
        for owner in (Methods, Methods()):
            assert [getattr(owner, name)(X) for name in names] == [dtype] * 3
        assert Methods().of_object(X) is dtype
        o1()


@pytest.mark.parametrize("name", ["plain", "plain_static", "plain_of_class"])
def test_registered_methods(library, name):
    method = vars(Methods)[name]
    ampatch.register_half_function(Methods, name)
    o1()
    assert getattr(Methods(), name)(X) is H
    if name != "plain":
        assert getattr(Methods, name)(X) is H
    ampatch.deactivate()
    assert vars(Methods)[name] is method
    assert getattr(Methods(), name)(X) is torch.float32


def test_what_cannot_follow_a_rule_is_refused():
    for wrong in (nn.Linear, dict):
        with pytest.raises(TypeError, match=r"half_function: \w+ is a class.*overrides="):
            ampatch.half_function(wrong)
    with pytest.raises(TypeError, match="promote_function: expected a function.*int"):
        ampatch.promote_function(3)


FP32 = torch.float32


def functions() -> tuple[type, type, list]:
    """New classes: a product, a cube (with `setup_context`), and what the product saw."""
    seen = []

    class Product(Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            if not torch.compiler.is_compiling():
                seen.append((x.dtype, w.dtype, grad.dtype, torch.mm(ONE, ONE).dtype))
            return grad @ w.t(), x.t() @ grad

    class Cube(Function):
        @staticmethod
        def forward(x):
            return x**3

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 3 * x**2 * grad

    return Product, Cube, seen


ONE = torch.ones(1, 1)


@pytest.fixture
def leaves():
    """`x` and `w` (3, 3), FP32, requiring gradients."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 3, generator=generator).requires_grad_() for _ in "xw"]


def grads(output: torch.Tensor, leaves: list) -> list:
    return list(torch.autograd.grad(output.sum(), leaves))


@pytest.mark.parametrize("registered", [False, True])
def test_forward_and_backward(leaves, registered):
    Product, _, seen = functions()
    plain = dict(vars(Product))
    exact = grads(Product.apply(*leaves), leaves)
    with forgotten_afterwards():
        if registered:
            ampatch.register_half_function(type("holder", (), {"Product": Product}), "Product")
        else:
            assert ampatch.half_function(Product) is Product
        seen.clear()
        assert Product.apply(*leaves).dtype is FP32
        o1()
        output = Product.apply(*leaves)
        gradients = grads(output, leaves)
        assert output.dtype is H and seen == [(H, H, H, H)]
        for gradient, other in zip(gradients, exact, strict=True):
            assert gradient.dtype is FP32
            torch.testing.assert_close(gradient, other, atol=0.05, rtol=0.02)
        ampatch.deactivate()
        assert Product.apply(*leaves).dtype is FP32
        assert not registered or dict(vars(Product)) == plain


def test_float_function_and_a_second_derivative():
    """`setup_context` gets the casts, too."""
    _, Cube, _ = functions()
    ampatch.float_function(Cube)
    o1()
    x = torch.tensor([1.0, -2.0, 3.0], dtype=H, requires_grad=True)
    output = Cube.apply(x)
    assert output.dtype is output.grad_fn.saved_tensors[0].dtype is FP32
    (first,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert first.dtype is second.dtype is H
    assert first.tolist() == [3.0, 12.0, 27.0] and second.tolist() == [6.0, -12.0, 18.0]


def test_promote_function(leaves):
    Product, _, seen = functions()
    ampatch.promote_function(Product)
    o1()
    x, w = leaves
    with ampatch.disable_casts(), pytest.raises(RuntimeError):
        Product.apply(x, w.to(H))
    grads(Product.apply(x, w.to(H)), leaves)
    assert seen[0][:2] == (FP32, FP32)


def test_backward_runs_under_the_casting_of_its_forward(leaves):
    Product, _, seen = functions()
    ampatch.half_function(Product)
    o1()
    with ampatch.disable_casts():
        output = Product.apply(*leaves)
    seen.clear()
    in_threads(lambda: grads(output, leaves))
    assert output.dtype is FP32 and seen == [(FP32, FP32, FP32, FP32)]
    assert torch.mm(ONE, ONE).dtype is H


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(leaves, backend):
    Product, Cube, _ = functions()
    ampatch.half_function(Product)
    ampatch.float_function(Cube)
    torch._dynamo.reset()
    product = torch.compile(lambda x, w: Product.apply(x, w), backend=backend, fullgraph=True)
    cube = torch.compile(lambda x: Cube.apply(x), backend=backend, fullgraph=True)
    half = leaves[0].detach().to(H).requires_grad_()
    assert product(*leaves).dtype is FP32 and cube(half).dtype is H
    o1()
    output = product(*leaves)
    assert output.dtype is H and cube(half).dtype is FP32
    eager = grads(Product.apply(*leaves), leaves)
    assert all(map(torch.equal, grads(output, leaves), eager))
    assert torch.equal(*grads(cube(half), [half]), *grads(Cube.apply(half), [half]))
    with ampatch.disable_casts():
        assert product(*leaves).dtype is FP32 and cube(half).dtype is H
    torch._dynamo.reset()
