"""Compiled, scripted, traced, exported, pickled, subclassed, in threads: the casts hold."""

from __future__ import annotations

import copy
import pickle
import sys
import textwrap
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from warm_python import python

import ampatch

X = torch.randn(4, 4)
H = torch.bfloat16
JIT = pytest.mark.filterwarnings("ignore:.*torch.jit")


@pytest.fixture(scope="module", autouse=True)
def torch_is_warm():
    """Compiling and scripting register functions of torch's own, once; do that before."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Softmax(-1))
    torch.compile(model, backend="aot_eager")(X).sum().backward()
    torch.export.export(model, (X,))


@pytest.fixture
def clean_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def o1(model=None):
    model = [] if model is None else model
    return ampatch.initialize(model, dtype=H, patch_scope="process", verbosity=0)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_of_a_model(backend, when, clean_dynamo):
    """The compiled model does what the eager managed one does; fullgraph: no graph break."""
    reference, model = net(), net()
    if when == "before":
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert compiled(X).dtype is torch.float32
        o1(model)
    else:
        compiled = torch.compile(o1(model), backend=backend, fullgraph=True)
    with torch.autocast("cpu", dtype=H):
        expected = reference(X)
    found = compiled(X)
    assert found.dtype is H
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    found.float().sum().backward()
    assert model[0].weight.grad.dtype is torch.float32
    ampatch.deactivate()
    assert compiled(X).dtype is torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_of_functions_notices_disable_casts(backend, clean_dynamo):
    o1()

    @torch.compile(backend=backend, fullgraph=True)
    def function(x, w):
        return F.linear(x, w) @ w, torch.softmax(x.to(H), -1)

    assert [out.dtype for out in function(X, X)] == [H, torch.float32]
    with ampatch.disable_casts():
        assert [out.dtype for out in function(X, X)] == [torch.float32, H]
    assert [out.dtype for out in function(X, X)] == [H, torch.float32]
    with ampatch.precision("float"):
        assert [out.dtype for out in function(X, X)] == [torch.float32, torch.float32]


# Pickle


def test_copies_of_layers_that_hold_functions():
    o1()
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation=F.softplus, batch_first=True)
    twin = copy.deepcopy(layer)
    assert twin.activation is F.softplus
    assert pickle.loads(pickle.dumps(layer)).activation is F.softplus
    nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)(torch.randn(1, 3, 8))


def test_pickles_load_where_ampatch_is_not(tmp_path):
    o1()
    functions = [
        F.linear,
        F.softplus,
        torch.mm,
        torch.linalg.norm,
        torch.Tensor.exp,
        torch.special.expm1,
        torch._VF.lstm,
    ]
    (tmp_path / "functions.pickle").write_bytes(pickle.dumps(functions))
    code = """
        import pickle, sys, torch
        found = pickle.load(open("functions.pickle", "rb"))
        assert "ampatch" not in sys.modules
        assert found[0] is torch.nn.functional.linear and found[2] is torch.mm
        assert found[4] is torch.Tensor.exp or found[4] == torch.Tensor.exp
        print(len(found))
    """
    assert in_a_process(code, cwd=tmp_path) == "7"


# Names


def test_names_bound_early_are_rebound_and_undone(monkeypatch):
    script = types.ModuleType("users_script")
    script.linear, script.mm, script.other = F.linear, torch.mm, 3
    monkeypatch.setitem(sys.modules, "users_script", script)
    originals = dict(vars(script))
    o1()
    assert script.linear(X, X).dtype is H and script.linear is F.linear
    assert script.mm(X, X).dtype is H
    ampatch.deactivate()
    assert all(vars(script)[name] is value for name, value in originals.items())


# Another torch


def in_a_process(code: str, **options) -> str:
    done = python("-W", "error", "-c", textwrap.dedent(code), **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


PRIVATE = """
import sys, torch, torch.jit._builtins, torch._C._functorch, torch.nn.modules.batchnorm
import torch._subclasses.fake_tensor
gone = [
    (torch.jit._builtins, "_get_builtin_table"),
    (torch._C._functorch, "peek_interpreter_stack"),
    (torch._subclasses.fake_tensor, "FakeTensor"),
    (torch._C, "_dispatch_tls_is_dispatch_key_excluded"),
    *((torch, name) for name in dir(torch) if name.startswith("_foreach_")),
    (torch._C, "_current_graph_task_id"),
    (torch._C, "_len_torch_function_stack"),
    (torch._C, "_storage_Use_Count"),
    (torch._C, "_increment_version"),
    (torch, "_amp_foreach_non_finite_check_and_unscale_"),
    (torch, "_amp_update_scale_"),
    (torch.nn.modules.batchnorm, "_BatchNorm"),
]
kept = [(owner, name, getattr(owner, name)) for owner, name in gone]
for owner, name in gone:
    delattr(owner, name)
import ampatch
for owner, name, value in kept:  # torch itself cannot do without
    setattr(owner, name, value)
"""


def test_a_torch_without_its_private_names():
    """Nor some young public ones: everything ampatch has a fallback for is gone."""
    code = (
        PRIVATE
        + """
import ampatch
x, originals = torch.ones(2, 4), [torch.nn.functional.linear, torch.exp]
for level in ("O1", "O2", "O3"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model, optimizer = ampatch.initialize(
        model, optimizer, opt_level=level, dtype="bfloat16", loss_scale="dynamic",
        init_scale=128.0, verbosity=0)
    seen = []
    model[1].register_forward_pre_hook(lambda *args: seen.append(model[0].weight.dtype))
    with ampatch.scale_loss(model(x * torch.randn(2, 4))[0].float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not ampatch.step_was_skipped(optimizer)
    saved = model.state_dict()
    assert saved["0.weight"].dtype is (torch.bfloat16 if level == "O3" else torch.float32)
    model.load_state_dict(saved)
    optimizer.zero_grad()
    with ampatch.scale_loss(model(x)[0].float().sum() * float("inf"), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert ampatch.step_was_skipped(optimizer)
    print(seen[0], model[0].weight.dtype, model[1].weight.dtype, torch.exp(x.half()).dtype)
    ampatch.deactivate()
    assert [torch.nn.functional.linear, torch.exp] == originals
    assert model(x).dtype is torch.float32
"""
    )
    lines = in_a_process(code).replace("torch.", "").splitlines()
    assert lines == [
        "float32 float32 float32 float32",
        "bfloat16 float32 float32 float16",
        "bfloat16 bfloat16 bfloat16 float16",
    ]


def test_functions_that_this_torch_lacks_are_left_out_and_listed():
    code = """
        import torch
        original = torch.trapz
        del torch.trapz, torch.special.expm1
        import ampatch
        ampatch.initialize([], dtype="bfloat16", patch_scope="process", verbosity=0)
        installation = ampatch.session.session.registry.installation
        named = {"torch.trapz", "torch.special.expm1"}
        print(named <= set(installation.missing), torch.mm(torch.eye(2), torch.eye(2)).dtype)
        ampatch.deactivate()
        assert not hasattr(torch, "trapz")
    """
    assert in_a_process(code) == "True torch.bfloat16"
