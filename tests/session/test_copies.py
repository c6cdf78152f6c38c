"""Copies and files: of managed models, of their optimizers, of layers that hold functions of torch.

Other copies of models: tests/models/test_models.py, tests/models/test_own_frames.py.
"""

import copy
import pickle
import textwrap
import types

import pytest
import torch
import torch.nn.functional as F
from session_pairs import build, one_step
from small_training import managed, train
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from warm_python import python

import ampatch
from ampatch.errors import AmpatchError
from ampatch.session.facade import open_sessions

X = torch.linspace(-1, 1, 12).view(3, 4)
H, FP32 = torch.bfloat16, torch.float32
LEVELS = ["O0", "O1", "O2", "O3"]


def weights_in(level):
    return H if level == "O3" else FP32


READER = """
import sys
sys.modules["ampatch"] = None  # not to be had
import torch
x = torch.linspace(-1, 1, 12).view(3, 4)
for level, output in torch.load("outputs.pt").items():
    model = torch.load(level + ".pt", weights_only=False)
    assert torch.equal(model(x.to(output.dtype)), output), level
    assert {value.dtype for value in model.parameters()} == {output.dtype}
    assert not model._forward_hooks and not model._forward_pre_hooks
    saved = torch.load(level + ".checkpoint", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
    optimizer.load_state_dict(saved["optimizer"])
    assert torch.equal(model(x.to(output.dtype)), output), level
    model.train()(x.to(output.dtype)).float().square().sum().backward()
    optimizer.step()
    assert all(bool(value.isfinite().all()) for value in model.parameters()), level
"""


def test_saved_models_and_checkpoints_load_where_ampatch_is_not(tmp_path):
    """And go on training there."""
    plain = {}
    for level in LEVELS:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Softmax(-1))
        model, optimizer = managed(model, level, kind=torch.optim.Adam)
        train(model, optimizer, (X, X))
        torch.save(model.eval(), tmp_path / f"{level}.pt")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, tmp_path / f"{level}.checkpoint")
        ampatch.deactivate()
        model.to(weights_in(level))
        plain[level] = model(X.to(weights_in(level)))
    torch.save(plain, tmp_path / "outputs.pt")
    done = python("-W", "error", "-c", READER, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_wrapper_subclasses_as_weights(opt_level):
    """O2 and O3 could change the wrapper's dtype but not what it wraps: refused."""
    model = nn.Sequential(layer := nn.Linear(4, 4))
    layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach().clone()))
    if opt_level in ("O2", "O3"):
        with pytest.raises(AmpatchError, match=r"Sequential.*'0.weight', a TwoTensor.*O1"):
            managed(model, opt_level)
        assert layer.weight.dtype is layer.weight.a.dtype is FP32
        assert not open_sessions() and not model._forward_hooks
        return
    managed(model, opt_level)
    output = layer(X)
    assert type(output) is TwoTensor and output.dtype is (H if opt_level == "O1" else FP32)
    output.float().sum().backward()
    assert type(layer.weight.grad) is TwoTensor and layer.weight.grad.dtype is FP32


# A model and its optimizer copied together; how they train: `tests/laws/situations_saved.py`


def start(level, model=None):
    return managed(build() if model is None else model, level, kind=torch.optim.AdamW, lr=0.05)


@pytest.mark.parametrize("protocol", [None, 2], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_copied_optimizer_holds_the_parameters_of_the_copied_model(level, protocol):
    """With their state, in the dtype of the weights."""
    model = build()
    model[3].bias.requires_grad_(False)
    model, optimizer = start(level, model)
    for number in range(3):
        one_step(model, optimizer, number)
    held = types.SimpleNamespace(trainer={"optimizer": optimizer}, model=model)
    twin = pickle.loads(pickle.dumps(held, protocol)) if protocol else copy.deepcopy(held)
    copied, its_optimizer = twin.model, twin.trainer["optimizer"]
    params, own = its_optimizer.param_groups[0]["params"], list(copied.parameters())
    assert all(a is b for a, b in zip(params, own, strict=True))
    assert set(its_optimizer.state) == set(own[:-1]) and not own[-1].requires_grad
    kept = torch.bfloat16 if level == "O3" else torch.float32
    of_state = [state["exp_avg"] for state in its_optimizer.state.values()]
    assert {value.dtype for value in (*own, *of_state)} == {kept}
    assert not {"step", "zero_grad", "__deepcopy__", "__reduce_ex__"} & set(vars(its_optimizer))
    assert all(map(torch.equal, own, model.parameters()))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_shallow_copy_of_an_optimizer_shares_its_parameters(level):
    _, optimizer = start(level)
    twin = copy.copy(optimizer)
    assert twin.param_groups is optimizer.param_groups and twin.state is optimizer.state


def test_two_models_and_one_optimizer():
    models = [build(0), build(1)]
    params = [param for model in models for param in model.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    ampatch.initialize(models, optimizer, opt_level="O2", verbosity=0)
    (first, second), copied = copy.deepcopy((models, optimizer))
    held = copied.param_groups[0]["params"]
    assert all(a is b for a, b in zip(held, [*first.parameters(), *second.parameters()]))


# Functions of torch's in copies and pickles of layers


@pytest.fixture
def o1():
    ampatch.initialize([], dtype="bfloat16", patch_scope="process", verbosity=0)


def test_copies_of_layers_that_hold_functions(o1):
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation=F.softplus, batch_first=True)
    twin = copy.deepcopy(layer)
    assert twin.activation is F.softplus
    assert pickle.loads(pickle.dumps(layer)).activation is F.softplus
    nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)(torch.randn(1, 3, 8))


def test_pickles_load_where_ampatch_is_not(o1, tmp_path):
    functions = [F.linear, F.softplus, torch.mm, torch.linalg.norm, torch.Tensor.exp]
    functions += [torch.special.expm1, torch._VF.lstm]
    (tmp_path / "functions.pickle").write_bytes(pickle.dumps(functions))
    code = """
        import pickle, sys, torch
        found = pickle.load(open("functions.pickle", "rb"))
        assert "ampatch" not in sys.modules
        assert found[0] is torch.nn.functional.linear and found[2] is torch.mm
        assert found[4] is torch.Tensor.exp or found[4] == torch.Tensor.exp
        assert len(found) == 7
    """
    done = python("-W", "error", "-c", textwrap.dedent(code), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
