"""`half_function` and its siblings on `torch.autograd.Function` classes, forward and backward."""

import pytest
import torch
from registrations import forgotten_afterwards
from small_training import in_threads
from torch.autograd import Function

import ampatch

H = torch.bfloat16
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


def o1():
    ampatch.initialize([], dtype=H, patch_scope="process", verbosity=0)


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
