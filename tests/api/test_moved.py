"""Old module paths work for one release: in imports, in pickles, in saved graphs."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import ampatch
from ampatch.moved import MODULES, NAMES


@pytest.mark.parametrize("old", sorted(MODULES))
def test_an_old_module_is_the_new_one_and_says_so(old, monkeypatch):
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{old} has moved to {MODULES[old]}"):
        found = importlib.import_module(old)
    assert found is importlib.import_module(MODULES[old])
    assert found.__spec__.name == found.__name__ == MODULES[old]


@pytest.mark.parametrize(("package", "name"), sorted(NAMES))
def test_an_old_attribute_is_the_new_one_and_says_so(package, name):
    with pytest.warns(DeprecationWarning, match=f"{package}.{name} has moved"):
        found = getattr(importlib.import_module(package), name)
    assert found is getattr(importlib.import_module(NAMES[package, name]), name)


def test_unknown_names_are_unknown():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("ampatch.no_such_module")
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        importlib.import_module("ampatch.models").no_such_name  # noqa: B018


def test_the_warning_names_the_line_that_imports(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import ampatch\nfrom ampatch.training import scale_loss\n")
    done = subprocess.run(
        [sys.executable, "-W", "always::DeprecationWarning", str(script)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "script.py:2: DeprecationWarning: ampatch.training has moved" in done.stderr


def test_a_pickle_that_names_the_old_path_of_a_hook_loads(monkeypatch):
    """What is left of a hook of ours in the pickle of a model's part."""
    part = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ampatch.initialize(part, torch.optim.SGD(part.parameters(), 0.1), opt_level="O2", verbosity=0)
    new = pickle.dumps(part[0], protocol=2)
    old = new.replace(b"campatch.models.hooks\n", b"campatch.hooks\n")
    assert old != new
    monkeypatch.delitem(sys.modules, "ampatch.hooks", raising=False)
    with pytest.warns(DeprecationWarning, match="ampatch.hooks has moved"):
        loaded = pickle.loads(old)
    assert torch.equal(loaded.weight, part[0].weight)


def test_a_saved_graph_that_names_the_old_path_loads():
    model = nn.Sequential(nn.Linear(2, 2))
    ampatch.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O2", verbosity=0)
    graph = torch.fx.symbolic_trace(model)
    load, (attributes, imports, *rest) = graph.__reduce__()
    assert "from ampatch.models.conversion import cast_tensors" in imports
    old = imports.replace("ampatch.models.conversion", "ampatch.models")
    with pytest.warns(DeprecationWarning, match="ampatch.models.cast_tensors has moved"):
        loaded = load(attributes, old, *rest)
    data = torch.randn(3, 2)
    assert torch.equal(loaded(data), graph(data))
