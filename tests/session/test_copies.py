"""Managed models saved; weights that are no plain tensors.

Copies: tests/models/test_models.py, tests/models/test_own_frames.py.
"""

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
