"""Functions of torch's in copies and pickles of layers."""

import copy
import pickle
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from warm_python import python

import ampatch


@pytest.fixture(autouse=True)
def o1():
    ampatch.initialize([], dtype="bfloat16", patch_scope="process", verbosity=0)


def test_copies_of_layers_that_hold_functions():
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation=F.softplus, batch_first=True)
    twin = copy.deepcopy(layer)
    assert twin.activation is F.softplus
    assert pickle.loads(pickle.dumps(layer)).activation is F.softplus
    nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)(torch.randn(1, 3, 8))


def test_pickles_load_where_ampatch_is_not(tmp_path):
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
