"""Operators that bring a kernel for autocast: at O1 to O3 they compute as under torch.autocast."""

import pytest
import torch
from small_training import Made
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampatch

H, FP32 = torch.bfloat16, torch.float32
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
seen: list[tuple] = []  # dtypes of an operator's arguments, and of a product in its code


def product():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def into_float(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    seen.append((a.dtype, b.dtype, product()))
    return a * b


def backward(ctx, grad):
    seen.append((grad.dtype, product()))
    a, b = ctx.saved_tensors
    return grad * b, grad * a


in_float = torch.library.custom_op("ampatch_tests::in_float", into_float, mutates_args=())
in_half = torch.library.custom_op("ampatch_tests::in_half", into_float, mutates_args=())
for _op, _dtype in ((in_float, FP32), (in_half, H)):
    _op.register_fake(lambda a, b: torch.empty_like(a))
    _op.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    torch.library.register_autocast(_op, "cpu", _dtype)
without = torch.library.custom_op("ampatch_tests::without", into_float, mutates_args=())


def own_kernel(a, b):
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    seen.append(("asked", torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
    with torch._C._ExcludeDispatchKeyGuard(autocast):
        return torch.ops.ampatch_tests.multiply(a.float(), b.float()).to(b.dtype)


LIBRARY = torch.library.Library("ampatch_tests", "FRAGMENT")
LIBRARY.define("multiply(Tensor a, Tensor b) -> Tensor")
LIBRARY.define("multiply.number(Tensor a, float b) -> Tensor")
LIBRARY.impl("multiply", into_float, "CompositeImplicitAutograd")
LIBRARY.impl("multiply.number", lambda a, b: a * b, "CompositeImplicitAutograd")
LIBRARY.impl("multiply", own_kernel, "AutocastCPU")

OPS = torch.ops.ampatch_tests
FORMS = {
    "by its name": lambda m, x: OPS.in_float(x, m.layer(x)),
    "by its overload": lambda m, x: OPS.in_float.default(x, m.layer(x)),
    "by its definition": lambda m, x: in_float(x, m.layer(x)),
    "half": lambda m, x: OPS.in_half(x, m.layer(x)),
    "a library's": lambda m, x: OPS.multiply(x, m.layer(x)),
    "by keywords": lambda m, x: OPS.multiply(b=x, a=m.layer(x)),
    "nested": lambda m, x: OPS.multiply(OPS.in_half(x, m.layer(x)), OPS.in_float(x, x)),
    "on a weight": lambda m, x: x @ OPS.in_half(m.layer.weight, m.layer.weight),
    "recomputed": lambda m, x: checkpoint(
        lambda y: OPS.in_float(y, m.layer(y)), x, use_reentrant=False
    ),
    "recomputed by reentry": lambda m, x: checkpoint(
        lambda y: OPS.in_half(y, m.layer(y)), x, use_reentrant=True
    ),
    "in a region of another half dtype": lambda m, x: in_region(m, x, dtype=torch.float16),
    "in a disabled region": lambda m, x: in_region(m, x, enabled=False),
}


def in_region(model, x, **region):
    hidden = model.layer(x)
    with torch.autocast("cpu", **region):
        return OPS.in_half(x, hidden)


def network(form):
    torch.manual_seed(0)
    return Made(form, layer=nn.Linear(4, 4))


def trained(level, form, **options):
    """What a step gives: the output, the gradients, and what the operators saw."""
    seen.clear()
    model, x = network(form), X.clone().requires_grad_()
    if level == "autocast":
        with torch.autocast("cpu", H):
            output = model(x)
    else:
        ampatch.initialize(model, opt_level=level, dtype=H, verbosity=0, **options)
        output = model(x)
    output.float().sum().backward()
    ampatch.deactivate()
    return output, [x.grad, *(param.grad for param in model.parameters())], list(seen)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    "level, scope", [("O1", "model"), ("O1", "process"), ("O2", "model"), ("O3", "model")]
)
def test_an_operator_gets_the_dtypes_that_its_kernel_asks_for(name, level, scope):
    """And computes as under autocast, at O1 to the bit."""
    expected, grads, saw = trained("autocast", FORMS[name])
    output, new_grads, seen_here = trained(level, FORMS[name], patch_scope=scope)
    assert seen_here == saw or (level != "O1" and name == "in a disabled region")
    if level == "O1":
        assert torch.equal(output, expected) and output.dtype is expected.dtype
        torch.testing.assert_close(new_grads, grads, atol=1e-2, rtol=1e-2)
    else:
        torch.testing.assert_close(output, expected, atol=5e-2, rtol=5e-2, check_dtype=False)
        new_grads = [grad if grad is None else grad.float() for grad in new_grads]
        torch.testing.assert_close(new_grads, grads, atol=0.1, rtol=5e-2)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_block_of_disable_casts_and_an_override_hold_for_operators_too(level):
    def off(model, x):
        hidden = model.layer(x)
        with ampatch.disable_casts():
            return OPS.in_half(x.float(), hidden.float())

    def recomputed(model, x):
        hidden = model.layer(x).float()
        with ampatch.disable_casts():
            return checkpoint(OPS.in_half, x.float(), hidden, use_reentrant=False)

    assert trained(level, off)[2][0][:2] == (FP32, FP32)
    saw = [call[:2] for call in trained(level, recomputed)[2] if len(call) == 3]
    assert saw == [(FP32, FP32)] * 2

    model = nn.Sequential(network(FORMS["half"]), network(FORMS["by its name"]))
    ampatch.initialize(
        model, opt_level=level, dtype=H, verbosity=0, overrides={"0": "float", "1": "half"}
    )
    seen.clear()
    model(X)
    assert [call[:2] for call in seen] == [(FP32, FP32), (FP32, FP32)]


def test_outside_of_forwards_half_tensors_and_weights_decide():
    model = network(FORMS["half"])
    ampatch.initialize(model, opt_level="O1", dtype=H, verbosity=0)
    assert OPS.in_half(X, X).dtype is FP32
    assert OPS.in_half(X, X.to(H)).dtype is H
    assert OPS.in_half(model.layer.weight, X[:1]).dtype is H
    with torch.autocast("cpu", torch.float16):
        assert OPS.in_float(X, X.to(H)).dtype is FP32
    assert torch.ops.aten.mm(X.to(H), X.T.to(H)).dtype is H  # torch's own have the tables
    with pytest.raises(RuntimeError, match="dtype"):
        torch.ops.aten.mm(X.to(H), X.T)
    ampatch.deactivate()
    ampatch.initialize(network(None), opt_level="O1", dtype=H, verbosity=0, patch_scope="process")
    assert OPS.in_half(X, X).dtype is H
    with ampatch.disable_casts():
        assert OPS.in_half(X, X).dtype is FP32


def test_it_is_asked_once_of_an_operator_and_all_goes_with_the_session(monkeypatch):
    asked = []
    ask = torch._ops.OpOverload.has_kernel_for_dispatch_key
    before = torch._ops.OpOverload.__call__, torch._ops.OpOverloadPacket.__call__

    def note(self, key):
        asked.append(str(self))
        return ask(self, key)

    monkeypatch.setattr(torch._ops.OpOverload, "has_kernel_for_dispatch_key", note)
    model = network(lambda m, x: OPS.without(x, OPS.multiply(m.layer(x).float(), x)))
    ampatch.initialize(model, opt_level="O1", dtype=H, verbosity=0)
    for _ in range(3):
        model(X)
        torch.ops.aten.add.Tensor(X, X)
    assert sorted(asked) == sorted({*asked}) and not any("aten" in name for name in asked)
    assert {"ampatch_tests.without.default", "ampatch_tests.multiply.default"} <= set(asked)
    ampatch.deactivate()
    assert before == (torch._ops.OpOverload.__call__, torch._ops.OpOverloadPacket.__call__)


def test_an_error_in_an_operator_leaves_casts_and_autocast_as_they_were():
    def raising(model, x):
        hidden = model.layer(x)
        with pytest.raises(RuntimeError):
            OPS.multiply(x, torch.ones(7, 7))
        return hidden @ x.T

    assert trained("O1", raising)[0].dtype is H and not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", ["by its definition", "half", "a library's", "nested"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_compiled_model_computes_and_has_gradients_as_the_model_does(level, name):
    model = network(FORMS[name])
    ampatch.initialize(model, opt_level=level, dtype=H, verbosity=0)
    compiled = torch.compile(model, backend="aot_eager")
    results = []
    for call in (model, compiled, compiled):
        model.zero_grad()
        x = X.clone().requires_grad_()
        output = call(x)
        output.float().sum().backward()
        results.append([output, x.grad, *(param.grad for param in model.parameters())])
    for result in results[1:]:  # the dtypes are compared too
        torch.testing.assert_close(result, results[0], atol=1e-2, rtol=1e-2)
    ampatch.deactivate()
    torch.compiler.reset()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_an_exported_model_returns_the_dtype_of_the_model(level):
    model = network(FORMS["by its name"])
    ampatch.initialize(model, opt_level=level, dtype=H, verbosity=0)
    expected = model(X)
    exported = torch.export.export(model, (X,)).module()
    torch.testing.assert_close(exported(X), expected, atol=1e-2, rtol=1e-2)
    ampatch.deactivate()
