"""torch.compile with `fullgraph=True`: the active policy is traced, guarded and put back."""

import functools

import pytest
import torch
import torch._dynamo
from small_training import Made, step
from torch import nn

import ampatch as amp

FP16, FP32 = torch.float16, torch.float32


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model, backend="eager"):
    """In whole graphs; without AOTAutograd unless that is named."""
    return torch.compile(model, backend=backend, fullgraph=True)


def twice():
    return Made(lambda self, x: self.layer(self.layer(x)), layer=nn.Linear(4, 4))


@pytest.fixture
def inputs():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "level, around, backend",  # around the model at O2: docs/limits.md
    [
        *(("O1", False, "aot_eager"), ("O2", False, "aot_eager"), ("O3", False, "aot_eager")),
        *(("O1", True, "aot_eager"), ("O3", True, "aot_eager")),
        pytest.param("O1", False, "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_was_compiled_and_called_before(inputs, level, around, backend):
    model = twice()
    fast = compiled((lambda x: model(x)) if around else model, backend)
    assert fast(inputs).dtype is FP32
    amp.initialize(model, opt_level=level, verbosity=0)
    eager, traced = model(inputs), fast(inputs)
    assert eager.dtype is (FP16 if level == "O1" else FP32)
    rounding = 0.02 if backend == "inductor" else 0
    torch.testing.assert_close(traced, eager, rtol=rounding, atol=rounding)
    traced.float().sum().backward()
    assert model.layer.weight.grad.dtype is (FP16 if level == "O3" else FP32)


@pytest.mark.parametrize("level", ["O0", None])
def test_another_model_beside_one_at_o1(inputs, level):
    managed, other = twice(), twice()
    if level:
        amp.initialize(other, opt_level=level, verbosity=0)
    amp.initialize(managed, verbosity=0, patch_scope="model")
    fast, plain = compiled(managed), compiled(other)
    assert fast(inputs).dtype is FP16
    assert torch.equal(plain(inputs), other(inputs)) and plain(inputs).dtype is FP32


def test_a_decorated_function_keeps_its_cast(inputs):
    @amp.half_function
    def double(x):
        return x + x

    amp.initialize(nn.Linear(2, 2), verbosity=0)
    assert compiled(double)(inputs).dtype is FP16
    assert compiled(lambda x: double(x) * 1)(inputs).dtype is FP16
    amp.deactivate()
    assert compiled(double)(inputs).dtype is FP32


# What is captured


class Capture(list):
    """A backend that keeps the graphs and runs them as they are."""

    def __call__(self, graph, example_inputs):
        self.append(graph)
        return graph.forward


@pytest.fixture
def capture():
    return Capture()


def test_the_casts_are_in_the_graph_and_no_weight_is_baked_in(capture, inputs):
    model = amp.initialize(twice(), verbosity=0)
    fast = compiled(model, capture)
    with torch.no_grad():
        before = fast(inputs)
        casts = [node for node in capture[0].graph.nodes if node.target == "to"]
        assert len(casts) == 5  # the input once; weight and bias at each use
        model.layer.weight.data.mul_(2)
        model.layer.bias.data.mul_(2)
        assert torch.equal(fast(inputs), model(inputs)) and not torch.equal(before, model(inputs))
    assert len(capture) == 1
    assert not [name for name, _ in capture[0].named_buffers()]


def test_switching_casts_off_and_on_compiles_each_kind_once(capture, inputs):
    model = twice()
    fast = compiled(model, capture)
    plain = fast(inputs)
    amp.initialize(model, verbosity=0)
    mixed = fast(inputs)
    for _ in range(3):
        with amp.disable_casts():
            assert torch.equal(fast(inputs), plain)
        with amp.precision("float"):
            assert torch.equal(fast(inputs), plain)
        assert torch.equal(fast(inputs), mixed)
    assert len(capture) <= 4
    amp.deactivate()
    assert torch.equal(fast(inputs), plain) and fast(inputs).dtype is FP32
    for settings in ({"enabled": False}, {"opt_level": "O0"}, {}):
        amp.initialize(model, verbosity=0, **settings)
        assert torch.equal(fast(inputs), plain if settings else mixed)
        amp.deactivate()


def test_dynamic_shapes(capture, opt_level):
    model = amp.initialize(twice(), opt_level=opt_level, verbosity=0)
    fast = torch.compile(model, backend=capture, fullgraph=True, dynamic=True)
    for rows in (2, 3, 5, 9):
        x = torch.ones(rows, 4)
        assert torch.equal(fast(x), model(x)) and fast(x).dtype is model(x).dtype
    assert len(capture) == 1


def mixed():
    """A norm that stays FP32, a layer that is used twice, and a weight of its own."""
    torch.manual_seed(0)
    parts = {"first": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4), "unused": nn.Linear(2, 2)}
    return Made(
        lambda self, x: self.first(torch.relu(self.norm(self.first(x)))) * self.scale,
        **{**parts, "scale": nn.Parameter(torch.ones(4))},
    )


def around_forward(model, optimizer, compile_it):
    loss_of = compile_it(lambda x: model(x).float().square().mean())
    return lambda x: step(loss_of(x), optimizer)


def of_model(model, optimizer, compile_it):
    forward = compile_it(model)
    return lambda x: step(forward(x).float().square().mean(), optimizer)


def wrapped(model, optimizer, compile_it):
    fast = torch.compile(model, **{**compile_it.keywords, "fullgraph": False})
    assert amp.initialize(fast, optimizer, **SETTINGS)[0] is fast
    return lambda x: step(fast(x).float().square().mean(), optimizer)


def in_place(model, optimizer, compile_it):
    model.compile(**compile_it.keywords)
    return lambda x: step(model(x).float().square().mean(), optimizer)


def whole_step(model, optimizer, compile_it):
    def whole(x):
        step(model(x).float().square().mean(), optimizer)

    return torch.compile(whole, **{**compile_it.keywords, "fullgraph": False})


SETTINGS: dict = {"dtype": torch.bfloat16, "verbosity": 0}


@pytest.mark.parametrize(
    "level, ways, when",  # a function is compiled at its first call, whenever it was given
    [
        *(("O2", of_model, "before"), ("O2", of_model, "after"), ("O2", in_place, "after")),
        *(("O2", around_forward, "before"), ("O2", whole_step, "after")),
        *((level, ways, "before") for level in ("O0", "O1", "O3") for ways in (in_place, wrapped)),
        *(("O2", wrapped, "before"), ("O1", of_model, "after")),
    ],
)
def test_training_equals_eager_and_compiles_once(level, ways, when, monkeypatch):
    results, graphs = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    monkeypatch.setitem(SETTINGS, "opt_level", level)
    for is_compiled in (False, True):
        torch._dynamo.reset()
        model = mixed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        compile_it = functools.partial(torch.compile, backend=backend, fullgraph=True)
        if is_compiled and when == "before":
            train = ways(model, optimizer, compile_it)
        if not (is_compiled and ways is wrapped):
            amp.initialize(model, optimizer, **SETTINGS)
        if not is_compiled:
            train = of_model(model, optimizer, lambda model: model)
        elif when == "after":
            train = ways(model, optimizer, compile_it)
        counts = []
        for seed in range(5):
            train(torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)))
            counts.append(len(graphs))
        assert len(set(counts[1:])) == 1, "compiled anew"
        with torch.no_grad():
            outputs = [model.eval()(torch.ones(n, 4)).float() for n in (2, 3)]
        used = [p for name, p in model.named_parameters() if "unused" not in name]
        assert all(p.grad.dtype is p.dtype for p in used) and model.unused.weight.grad is None
        results.append([*outputs, *model.state_dict().values(), *(p.grad for p in used)])
        amp.deactivate()
    assert graphs
    for eager, traced in zip(*results, strict=True):  # O1 adds up both uses of a layer in half
        bound = 0.02 if level == "O1" else 0
        torch.testing.assert_close(traced, eager, rtol=bound, atol=bound)


@pytest.mark.parametrize("around", [False, True])
def test_a_parameter_or_layer_replaced_after_compiling_counts(inputs, around):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    amp.initialize(model, opt_level="O2", verbosity=0)
    fast = compiled((lambda x: model(x)) if around else model)
    assert torch.equal(fast(inputs), model(inputs))
    model[0].weight = new = nn.Parameter(torch.randn(4, 4))
    fast(inputs)
    assert model[0].weight is new and torch.equal(fast(inputs), model(inputs))
    model[2] = nn.Linear(4, 4)
    assert torch.equal(fast(inputs), model(inputs))
