"""Managed models shared and saved; weights that are no plain tensors.

Copies: tests/models/test_models.py.
"""

import copy
import pickle

import pytest
import torch
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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.softmax(self.layer(x), -1)


def weights_in(level):
    return H if level == "O3" else FP32


def start(level, model=None, **settings):
    return managed(Net() if model is None else model, level, **settings)


def test_a_shallow_copy_shares_weights_and_casts(opt_level):
    """As in plain torch: attributes are the copy's own, what they refer to is shared."""
    model, _ = start(opt_level)
    twin = copy.copy(model)
    twin.title = "twin"
    assert twin.layer is model.layer and not hasattr(model, "title")
    assert torch.equal(twin(X), model(X)) and twin(X).dtype is model(X).dtype
    assert not {"__deepcopy__", "__reduce_ex__"} & set(vars(twin))
    with torch.no_grad():
        model.layer.weight.zero_()
    assert torch.equal(twin(X), model(X))
    ampatch.deactivate()
    assert not twin._forward_hooks and not twin._forward_pre_hooks
    assert torch.equal(twin(X), model(X))


class PicklesItself(Net):
    def __getstate__(self):
        return [self.layer]

    def __setstate__(self, state):
        nn.Module.__init__(self)
        self.layer = state[0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_with_its_own_state(opt_level, copied):
    loaded, kept = copied(start(opt_level, PicklesItself())[0]), weights_in(opt_level)
    assert loaded.layer.weight.dtype is kept and not loaded._forward_hooks
    assert loaded(X.to(kept)).dtype is kept or opt_level == "O1"


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
        model, optimizer = start(level, model, kind=torch.optim.Adam)
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
    model = Net()
    weight = model.layer.weight.detach()
    model.layer.weight = nn.Parameter(TwoTensor(weight, weight.clone()))
    if opt_level in ("O2", "O3"):
        with pytest.raises(AmpatchError, match=r"Net.*'layer.weight', a TwoTensor.*O1"):
            start(opt_level, model)
        assert model.layer.weight.dtype is model.layer.weight.a.dtype is FP32
        assert not open_sessions() and not model._forward_hooks
        return
    start(opt_level, model)
    output = model.layer(X)
    assert type(output) is TwoTensor and output.dtype is (H if opt_level == "O1" else FP32)
    output.float().sum().backward()
    assert type(model.layer.weight.grad) is TwoTensor and model.layer.weight.grad.dtype is FP32
