"""apex's compiled modules: names that programs look up, and what a call of a missing one says."""

from __future__ import annotations

import importlib
import sys
import types

import pytest

from ampatch.compat import apex as compat
from ampatch.compat.apex import kernels
from ampatch.compat.apex.packages import REPLACEMENTS, replacement

MISSING = [(module, name) for module, names in kernels.NAMES.items() for name in names.split()]


@pytest.mark.parametrize("module", kernels.NAMES)
def test_a_module_can_be_imported_and_its_names_looked_up(module):
    found = importlib.import_module(module)
    assert found.__spec__.name == module
    for name in kernels.NAMES[module].split():
        assert callable(getattr(found, name)) and f"{module}.{name}" in repr(getattr(found, name))
    assert not hasattr(found, "no_such_kernel")


@pytest.mark.parametrize("module, name", MISSING)
def test_a_call_names_the_kernel_and_what_to_use(module, name):
    function = getattr(importlib.import_module(module), name)
    with pytest.raises(NotImplementedError) as raised:
        function(1, [], key=2)
    said = str(raised.value)
    assert said.startswith(f"{module}.{name}(...)") and replacement(f"{module}.{name}") in said
    assert "never calls it, there is nothing to do" in said


def test_every_replacement_of_a_kernel_is_used():
    used = {replacement(f"{module}.{name}") for module, name in MISSING}
    used |= {replacement(f"{module}.other") for module in kernels.NAMES}
    own = {says for name, says in REPLACEMENTS.items() if name.partition(".")[0] != "apex"}
    assert own <= used


def test_lookups_at_import_as_programs_have_them():
    scope: dict = {}
    exec("import amp_C; k = amp_C.multi_tensor_lamb_stage1_cuda; from amp_C import *", scope)
    assert scope["multi_tensor_scale"] is compat.kernels.amp_c.multi_tensor_scale
    with pytest.raises(ImportError):  # guarded by programs: contrib is not here
        exec("from apex.contrib.layer_norm import FastLayerNorm")
    with pytest.raises(ImportError):
        exec("from amp_C import no_such_kernel")


def test_installed_kernels_are_not_hidden(monkeypatch):
    compat.uninstall()
    assert "syncbn" not in sys.modules
    installed = types.ModuleType("syncbn")
    monkeypatch.setitem(sys.modules, "syncbn", installed)
    compat.install()
    assert importlib.import_module("syncbn") is installed
