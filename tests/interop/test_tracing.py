"""torch.fx, torch.jit.script and trace, torch.export: what becomes of the casts."""

import io
import logging

import pytest
import torch
import torch.nn.functional as F
from small_training import step
from torch import nn

import ampatch
from ampatch.interop import torchscript
from ampatch.session.facade import open_sessions

X = torch.randn(4, 4)
H, FP32 = torch.bfloat16, torch.float32
JIT = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
LEVELS = ["O0", "O1", "O2", "O3"]


class Net(nn.Module):
    """Two layers and functions; the outputs are left in the dtypes they have."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
        self.head = nn.Linear(4, 4)

    def forward(self, x, scale: float = 1.0):
        y = self.head(self.body(x))
        return y, torch.softmax(y, -1) * scale


def managed(level, model=None, **options):
    model = Net().eval() if model is None else model
    options = {"dtype": H, "verbosity": 0, **options}
    options = {"patch_scope": "process", **options}
    return ampatch.initialize(model, opt_level=level, **options)


def same(actual, expected) -> bool:
    return all(
        a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(actual, expected, strict=True)
    )


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, "ampatch")
    return lambda: [record.getMessage() for record in caplog.records]


# torch.fx


class Own(nn.Module):
    """Reads a weight beside a layer and a function."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.layer = nn.Parameter(torch.eye(4)), nn.Linear(4, 4)

    def forward(self, x):
        return torch.softmax(self.layer(F.linear(x, self.weight)), -1)


@pytest.mark.parametrize("is_root", [True, False])
def test_a_traced_graph_is_fp32_on_the_models_weights_or_an_error(opt_level, is_root):
    """As under torch.amp the trace records no casts; layers that are its steps may be half."""
    model = managed(opt_level, Own(), patch_scope="model")
    graph = torch.fx.symbolic_trace(model if is_root else nn.Sequential(model))
    assert len(list(graph.parameters())) == 3 and not list(graph.buffers())
    if opt_level == "O3":
        with pytest.raises(RuntimeError, match="dtype"):
            graph(X)
        return
    plain = Own()
    for net in (model, plain):
        with torch.no_grad():
            net.weight.add_(1)  # what is trained or loaded later counts in the graph
    torch.testing.assert_close(graph(X).float(), plain(X), rtol=0.02, atol=0.02)
    graph(X).float().square().sum().backward()
    plain(X).square().sum().backward()
    torch.testing.assert_close(model.weight.grad, plain.weight.grad, rtol=0.05, atol=0.05)
    ampatch.deactivate()
    assert torch.equal(graph(X), plain(X))


# torch.jit


def linear_of(x, w):
    return F.linear(x, w) + torch.mm(x, w)


def free_of_lists(x: torch.Tensor) -> torch.Tensor:
    return x[:, :2] + 1


@JIT
def test_script_of_a_function_is_not_cast_and_says_so(said):
    managed("O1", [], verbosity=1)
    scripted = torch.jit.script(linear_of)
    (message,) = said()
    assert "script(linear_of)" in message and "(linear, mm)" in message
    with ampatch.disable_casts():
        assert torch.equal(scripted(X, X), linear_of(X, X))
        torch.jit.script(linear_of)
    torch.jit.script(free_of_lists)
    torch.jit.script(F.normalize)  # forward-mode AD has torch script its decompositions
    assert len(said()) == 1
    assert torchscript.operators_without_casts(torch.jit.script(F.normalize))
    assert torchscript.operators_without_casts(object()) == []  # a torch without inlined graphs


@JIT
def test_script_finds_the_names_around_its_caller():
    """It looks into its caller's frame; ours lies between."""
    managed("O1", [])

    class Pair:
        def __init__(self, x: torch.Tensor):
            self.x = x

        def twice(self) -> torch.Tensor:
            return twice(self.x)

    @torch.jit.script
    def twice(x: torch.Tensor):
        return x * 2

    assert torch.equal(torch.jit.script(Pair)(X).twice(), X * 2)


@JIT
def test_script_of_a_managed_model(opt_level, said):
    """Hooks cannot be scripted; the model is compiled as its weights are, and on these."""
    model = managed(opt_level, verbosity=1)
    scripted = torch.jit.script(model)
    warned = [m for m in said() if "torch.jit.script(Net)" in m]
    assert len(warned) == (opt_level == "O1")
    kept = H if opt_level == "O3" else FP32
    expected = Net().eval().to(kept)
    with ampatch.disable_casts():
        torch.testing.assert_close(scripted(X.to(kept)), expected(X.to(kept)), rtol=0.02, atol=0.02)
    assert {p.dtype for p in scripted.parameters()} == {kept}
    assert model(X)[0].dtype is (H if opt_level == "O1" else FP32)  # still managed
    assert scripted.head.weight.data_ptr() == model.head.weight.data_ptr()
    ampatch.deactivate()
    assert "__prepare_scriptable__" not in vars(model)


@JIT
@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_a_scripted_submodule(level, said):
    """Compiled before `initialize`: not cast at O1, which is said; converted at O3."""
    torch.manual_seed(0)
    model = nn.Sequential(torch.jit.script(Net().body), nn.Linear(4, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"dtype": H, "verbosity": 1, "loss_scale": 1.0}
    ampatch.initialize(model, optimizer, opt_level=level, **options)
    assert {model[0][i].weight.dtype for i in (0, 1)} == {H if level == "O3" else FP32}
    warned = [m for m in said() if "Sequential.0 is TorchScript" in m and "(linear)" in m]
    assert len(warned) == (level == "O1")
    saved = model.state_dict()
    kept = H if level == "O3" else FP32
    assert {value.dtype for name, value in saved.items() if "num" not in name} == {kept}
    assert all(torch.equal(saved[name], before[name].to(saved[name].dtype)) for name in before)
    step(model(X).float().pow(2).mean(), optimizer)
    assert not torch.equal(model.state_dict()["0.0.weight"], before["0.0.weight"])
    model.load_state_dict(before)
    ampatch.deactivate()
    after = model.state_dict()
    for name in before:
        rounded = before[name].to(H).to(before[name].dtype) if level == "O3" else before[name]
        assert torch.equal(after[name], rounded if "num" not in name else before[name])


@JIT
@pytest.mark.parametrize(
    "make, place",
    [
        (lambda body: nn.Sequential(torch.jit.script(body)), "Sequential.0"),
        (lambda body: nn.Sequential(torch.jit.trace(body, X)), "Sequential.0"),
        (lambda body: torch.jit.trace(body, X), "TopLevelTracedModule"),
    ],
)
def test_weights_in_torchscript_are_refused_at_o2_and_nothing_is_done(make, place):
    model = make(Net().body.eval())
    other, optimizer = nn.Linear(4, 4), torch.optim.SGD(model.parameters(), lr=0.1)
    before = dict(vars(model))
    with pytest.raises(ampatch.AmpatchError, match=f"^{place} is TorchScript.*'O2' needs it unsc"):
        ampatch.initialize([other, model], optimizer, opt_level="O2", verbosity=0)
    assert vars(model) == before and not open_sessions()
    assert not other._forward_hooks and "step" not in vars(optimizer)
    assert managed("O1", model)(X) is not None


@JIT
def test_a_scripted_model_is_refused_by_name_and_nothing_is_left():
    scripted = torch.jit.script(Net())
    optimizer = torch.optim.SGD(scripted.parameters(), lr=0.1)
    for level in LEVELS:
        with pytest.raises(ampatch.AmpatchError, match=r"models\[0\], Net, is TorchScript"):
            ampatch.initialize(scripted, optimizer, opt_level=level)
        assert {param.dtype for param in scripted.parameters()} == {FP32}
        assert F.linear(X, X).dtype is FP32 and "step" not in vars(optimizer)
        assert "_ampatch_frames" not in vars(scripted)
    assert not open_sessions()
    assert managed("O1", nn.Sequential(scripted))(X)[0].dtype is FP32


@JIT
def test_jit_trace_of_a_managed_model(opt_level, tmp_path, said):
    model = managed(opt_level)
    traced = torch.jit.trace(model, X)
    expected = model(X)
    assert same(traced(X), expected)
    traced.save(tmp_path / "traced.pt")
    ampatch.deactivate()
    assert same(torch.jit.load(tmp_path / "traced.pt")(X), expected), "the casts are in it"
    if opt_level == "O1":
        managed(opt_level, traced, verbosity=1)
        assert same(traced(X), expected) and "TopLevelTracedModule is TorchScript" in said()[0]


# torch.export


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.10's, of loading
@pytest.mark.parametrize(
    "level, strict, scope",
    [
        *((level, False, "process") for level in LEVELS),
        *(("O1", True, "process"), ("O1", True, "model"), ("O2", True, "model")),
    ],
)
def test_export(level, strict, scope):
    """The exported program holds the casts; saved, it needs no ampatch."""
    model = managed(level, patch_scope=scope)
    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(model, (X,), dynamic_shapes={"x": {0: batch}}, strict=strict)
    more = torch.randn(7, 4)
    expected = model(more)
    assert same(exported.module()(more), expected)
    assert ampatch.cache_info().entries == 0
    file = io.BytesIO()
    torch.export.save(exported, file)
    ampatch.deactivate()
    file.seek(0)
    assert same(torch.export.load(file).module()(more), expected)
