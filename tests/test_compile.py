"""torch.compile with `fullgraph=True`: the policy in force is traced, guarded and put back."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import ampatch as amp

FP16, FP32 = torch.float16, torch.float32


class Three(nn.Module):
    """Three linear layers; returns what each gave."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        first = self.a(x)
        second = self.b(first)
        return first, second, self.c(second)


@pytest.fixture(params=["eager", "aot_eager"])
def compiled(request):
    """Compiles for a backend, whole graphs only."""
    torch._dynamo.reset()
    yield lambda model: torch.compile(model, backend=request.param, fullgraph=True)
    torch._dynamo.reset()


@pytest.fixture
def inputs():
    """Input (3, 4)."""
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_equals_eager(compiled, inputs, level, when):
    model = Three()
    if when == "before":
        fast = compiled(model)
        assert fast(inputs)[0].dtype is FP32
    amp.initialize(model, opt_level=level, verbosity=0)
    if when == "after":
        fast = compiled(model)
    for eager, traced in zip(model(inputs), fast(inputs), strict=True):
        assert eager.dtype is traced.dtype is (FP16 if level == "O1" else FP32)
        assert torch.equal(eager, traced)


def test_it_recompiles_when_the_policy_changes(compiled, inputs):
    model = Three()
    amp.initialize(model, verbosity=0)
    fast = compiled(model)
    for _ in range(2):
        assert fast(inputs)[2].dtype is FP16
        with amp.disable_casts():
            assert fast(inputs)[2].dtype is FP32
        with amp.precision("float"):
            assert fast(inputs)[2].dtype is FP32
    amp.deactivate()
    assert fast(inputs)[2].dtype is FP32


def test_hooks_are_not_compiled_as_frames_of_their_own(inputs):
    """One code object for all models: a few of them would reach Dynamo's recompile limit."""
    for level in ("O1", "O2"):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        model = amp.initialize(Three(), opt_level=level, verbosity=0)
        torch.compile(model, backend=counter, fullgraph=True)(inputs)
        assert counter.frame_count == 1
    torch._dynamo.reset()


def test_a_compiled_function_that_calls_the_model(compiled, inputs):
    for level in ("O1", "O2"):
        model = amp.initialize(Three(), opt_level=level, verbosity=0)
        assert all(map(torch.equal, compiled(lambda x, m=model: m(x))(inputs), model(inputs)))
        amp.deactivate()


def test_an_overridden_submodule(compiled, inputs):
    model = Three()
    amp.initialize(model, verbosity=0, overrides={"b": "float"})
    eager = model(inputs)
    assert [output.dtype for output in eager] == [FP16, FP32, FP16]
    assert all(map(torch.equal, compiled(model)(inputs), eager))


def test_scope_model(compiled, inputs):
    managed, other = Three(), Three()
    amp.initialize(managed, verbosity=0, patch_scope="model")
    fast, plain = compiled(managed), compiled(other)
    assert fast(inputs)[0].dtype is FP16
    assert torch.equal(plain(inputs)[0], other(inputs)[0]) and plain(inputs)[0].dtype is FP32
    with amp.disable_casts():
        assert fast(inputs)[0].dtype is FP32
    assert fast(inputs)[0].dtype is FP16


def test_a_model_at_o0_beside_one_at_o1(compiled, inputs):
    plain, mixed = Three(), Three()
    amp.initialize(plain, opt_level="O0", verbosity=0)
    amp.initialize(mixed, verbosity=0)
    assert compiled(mixed)(inputs)[0].dtype is FP16
    assert all(map(torch.equal, compiled(plain)(inputs), plain(inputs)))
    assert plain(inputs)[0].dtype is FP32


def test_training_a_compiled_model(compiled, inputs):
    torch.manual_seed(0)
    model = Three()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, verbosity=0)
    fast, losses = compiled(model), []
    for _ in range(6):
        optimizer.zero_grad()
        loss = fast(inputs)[2].float().pow(2).mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert all(parameter.grad.dtype is FP32 for parameter in model.parameters())
    assert amp.cache_info().misses == 0, "a cached weight in the graph would go stale"


def test_a_decorated_function_keeps_its_cast(compiled, inputs):
    @amp.half_function
    def double(x):
        return x + x

    amp.initialize(nn.Linear(2, 2), verbosity=0)
    assert compiled(double)(inputs).dtype is FP16
    assert compiled(lambda x: double(x) * 1)(inputs).dtype is FP16
    amp.deactivate()
    assert compiled(double)(inputs).dtype is FP32


def test_the_compiler_knows_torchs_functions_after_a_session():
    """Dynamo reads its table of torch's functions by name, at a time when they may be patched."""
    rules = pytest.importorskip("torch._dynamo.trace_rules")
    rules.get_torch_obj_rule_map.cache_clear()
    product = [torch.bmm]  # in a list, where early names are not looked for
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    assert product[0] not in rules.get_torch_obj_rule_map()
    amp.deactivate()
    assert product[0] in rules.get_torch_obj_rule_map()
