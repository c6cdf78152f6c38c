"""torch.compile in whole graphs: the policy is traced and guarded, layers compute as in eager."""

import functools
import subprocess
import sys

import pytest
import torch
import torch._dynamo
import torch._dynamo.trace_rules as rules
import torch._dynamo.variables.torch as variables
import torch.nn.functional as F
from small_training import Made, step
from torch import nn

import ampatch as amp

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


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


def start(model, **options):
    return amp.initialize(model, opt_level="O1", dtype=BF16, verbosity=0, **options)


def calls(function, *shape):
    weight = nn.Parameter(torch.randn(shape))
    return Made(lambda self, x: function(x, self.weight), weight=weight)


CASES = {
    "conv1d": (lambda: nn.Conv1d(3, 4, 3), (2, 3, 8)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, padding="same"), (2, 3, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(3, 4, 3), (2, 3, 5, 5, 5)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(3, 4, 3), (2, 3, 8)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 5, 5)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(3, 4, 3), (2, 3, 4, 4, 4)),
    "batch_norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (2, 3, 6, 6)),
    "group_norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), (2, 3, 6, 6)),
    "layer_norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)), (3, 4)),
    "softmax": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Softmax(-1)), (3, 4)),
    "torch.softmax": (lambda: calls(lambda x, w: torch.softmax(F.linear(x, w), -1), 6, 4), (3, 4)),
    "layers": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.LayerNorm(4), nn.Flatten(),
            nn.Linear(64, 5),
        ),
        (2, 3, 6, 6),
    ),
    "matmul": (lambda: calls(lambda x, w: torch.matmul(x, w), 4, 5), (3, 4)),
    "operator": (lambda: calls(lambda x, w: x @ w, 4, 5), (3, 4)),
    "bmm": (lambda: calls(lambda x, w: torch.bmm(x, w), 2, 4, 5), (2, 3, 4)),
    "baddbmm": (lambda: calls(lambda x, w: torch.baddbmm(x @ w, x, w), 2, 4, 4), (2, 4, 4)),
    "Tensor.bmm": (lambda: calls(lambda x, w: torch.Tensor.bmm(x, w), 2, 4, 5), (2, 3, 4)),
    "einsum": (lambda: calls(lambda x, w: torch.einsum("ij,jk->ik", x, w), 4, 5), (3, 4)),
    "einsum of elements": (lambda: calls(lambda x, w: torch.einsum("i,j->ij", x, w), 5), (3,)),
    "exp": (lambda: calls(lambda x, w: torch.exp(F.linear(x, w)), 5, 4), (3, 4)),
    "bilinear": (lambda: calls(lambda x, w: torch.bilinear(x, x, w, None), 5, 4, 4), (3, 4)),
    "attention": (
        lambda: calls(lambda x, w: F.scaled_dot_product_attention(x, w, x), 2, 2, 4, 8),
        (2, 2, 4, 8),
    ),
    "MultiheadAttention": (
        lambda: Made(lambda self, x: self.inner(x, x, x), inner=nn.MultiheadAttention(8, 2)),
        (3, 2, 8),
    ),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
        (3, 2, 8),
    ),
    "LSTMCell": (lambda: nn.LSTMCell(4, 5), (3, 4)),
    "cross_entropy": (
        lambda: calls(
            lambda x, w: F.cross_entropy(F.linear(x, w), torch.tensor([0, 1, 2])), 5, 4
        ),
        (3, 4),
    ),
}  # fmt: skip


class Several(nn.Module):
    """Cases beside each other, in one graph: `model(*inputs)` is what each gives of its own."""

    def __init__(self, cases):
        super().__init__()
        self.parts = nn.ModuleList(CASES[case][0]() for case in cases)

    def forward(self, *inputs):
        outputs = [part(x) for part, x in zip(self.parts, inputs)]
        return [output if isinstance(output, tuple) else (output,) for output in outputs]


def passes(model, call, inputs):
    """Of each case: outputs and gradients of a forward and a backward pass through `call`."""
    model.zero_grad()
    inputs = [x.clone().requires_grad_() for x in inputs]
    outputs = call(*inputs)
    sum(out.float().sin().sum() for of_case in outputs for out in of_case).backward()
    grads = [[x.grad for x in (x, *part.parameters())] for part, x in zip(model.parts, inputs)]
    return [[*out, *grad] for out, grad in zip(outputs, grads, strict=True)]


TRACED_AGAIN = (  # by AOTAutograd, which calls what is in Dynamo's graph: rules of each kind
    *("conv2d", "layer_norm", "softmax", "operator", "baddbmm", "attention", "LSTMCell"),
    *("MultiheadAttention", "cross_entropy"),
)


@pytest.mark.parametrize(
    "cases, backend",
    [*(([*CASES][first::3], "eager") for first in range(3)), (TRACED_AGAIN, "aot_eager")],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_compiled_equals_eager(cases, backend):
    torch.manual_seed(0)
    model, inputs = start(Several(cases)), [torch.randn(CASES[case][1]) for case in cases]
    fast = torch.compile(model, backend=backend, fullgraph=True)
    results = passes(model, model, inputs), passes(model, fast, inputs)
    for case, plain, compiled in zip(cases, *results, strict=True):
        assert [value.dtype for value in plain] == [value.dtype for value in compiled], case
        assert all(map(torch.equal, plain, compiled)), case


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_policy_inside_the_graph_is_the_one_that_counts(backend):
    """The graph calls torch.conv1d by name, and runs under the policy around it."""
    parts = {name: nn.Conv1d(3, 3, 1) for name in "ab"}
    model = Made(lambda self, x: (first := self.a(x), self.b(first)), **parts)
    model, x = start(model, overrides={"b": "float"}), torch.randn(2, 3, 5)

    def without_casts(x):
        with amp.disable_casts():
            first = torch.conv1d(x, model.a.weight)
        return first, torch.conv1d(x, model.a.weight)

    for call, dtypes in ((model, [BF16, FP32]), (without_casts, [FP32, BF16])):
        eager = call(x)
        compiled = torch.compile(call, backend=backend, fullgraph=True)(x)
        assert [output.dtype for output in compiled] == dtypes
        assert all(map(torch.equal, compiled, eager))


# Dynamo itself

LATE = """
import sys, torch, ampatch
model = torch.nn.Conv1d(3, 4, 3)
ampatch.initialize(model, verbosity=0)
assert "torch._dynamo" not in sys.modules, "initialize must not import it: it takes seconds"
import torch._dynamo
import torch._dynamo.trace_rules as rules, torch._dynamo.variables.torch as variables
def tables():
    named = lambda kind: getattr(kind, "__qualname__", repr(kind))
    return [
        sorted((repr(key), named(rule)) for key, rule in rules.get_torch_obj_rule_map().items()
               if "Polyfilled" not in named(rule)),  # these are added as polyfills are imported
        sorted(map(repr, rules.get_tensor_method())),
        sorted(map(repr, variables.TorchInGraphFunctionVariable._get_handlers())),
        sorted(map(repr, getattr(variables, "ops_consuming_unbacked_scalars", ()))),
    ]
during = tables()
torch.compile(model, backend="eager", fullgraph=True)(torch.randn(2, 3, 8))
ampatch.deactivate()
after = tables()
assert during == after
rules.clear_lru_cache()
variables.TorchInGraphFunctionVariable._get_handlers.cache_clear()
for kept, fresh in zip(after, tables()):
    # all but torch.manual_seed, which Dynamo itself replaces after it has filled its tables
    assert {row for row in {*kept} ^ {*fresh} if "manual_seed" not in repr(row)} == set()
rows = [thing for row in rules.get_torch_obj_rule_map().items() for thing in row]
rows += [*rules.get_tensor_method(), *getattr(variables, "ops_consuming_unbacked_scalars", ())]
for row in variables.TorchInGraphFunctionVariable._get_handlers().items():
    rows += row
modules = {str(getattr(thing, "__module__", "")).partition(".")[0] for thing in rows}
assert "torch" in modules and "ampatch" not in modules
"""


def test_a_compiler_imported_late_has_the_tables_it_would_have_had():
    subprocess.run([sys.executable, "-c", LATE], check=True)


def owned():
    """What a session may replace in Dynamo."""
    handlers = vars(variables.TorchInGraphFunctionVariable)
    return [
        *(vars(rules).get(name) for name in ("load_object", "get_tensor_method")),
        *(vars(rules).get(name) for name in ("is_callable_allowed", "get_torch_obj_rule_map")),
        *(handlers.get("_get_handlers"), vars(variables).get("ops_consuming_unbacked_scalars")),
    ]


def test_dynamo_is_as_found_after_a_session():
    """In the same table, to which later imports of others add their rules."""
    before, table = owned(), rules.get_torch_obj_rule_map()
    start(nn.Linear(2, 2))
    assert any(new is not old for new, old in zip(owned(), before, strict=True))
    amp.deactivate()
    assert all(new is old for new, old in zip(owned(), before, strict=True))
    assert rules.get_torch_obj_rule_map() is table


def test_a_torch_without_the_private_names(monkeypatch):
    """Compiling then breaks graphs, but sessions open and close."""
    for name in ("load_object", "get_tensor_method", "is_callable_allowed"):
        monkeypatch.delattr(rules, name)
    monkeypatch.delattr(variables.TorchInGraphFunctionVariable, "_get_handlers")
    monkeypatch.delattr(variables, "ops_consuming_unbacked_scalars", raising=False)
    model = start(nn.Linear(2, 2))
    assert model(torch.ones(1, 2)).dtype is BF16
    amp.deactivate()
    assert not hasattr(rules, "load_object")
