"""Entries of tables, natively or in Python.  Exchanges all or none: test_casts.py."""

import ast
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ampatch
from ampatch import native
from ampatch.models import half_copy_slots
from ampatch.native import loading

A, B, C = object(), object(), object()


def test_one_tensor_goes_to_several_places():
    tables = [{"a": A, "b": B}, {"a": A}]
    every = [tables[0], tables[0], tables[1]], ["a", "b", "a"], [1, 0, 1]
    assert half_copy_slots.set_entries(*every, [B, C], None)
    assert tables == [{"a": C, "b": B}, {"a": C}]
    assert list(tables[0]) == ["a", "b"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
@pytest.mark.skipif(native.part is None, reason="the native part is not active")
def test_small_inputs_within_the_limit_are_cast_in_one_call():
    def copy_of(tensor: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor | None:
        return native.part.fitting_copy(tensor, dtype, 256.0)

    for shape in [(), (0,), (3, 5), (64, 64)]:
        tensor = torch.randn(shape)
        half = copy_of(tensor)
        assert half.dtype is torch.bfloat16 and torch.equal(half, tensor.to(torch.bfloat16))
        assert half.stride() == tensor.to(torch.bfloat16).stride()
    for value in (256.0, -256.0, math.inf, -math.inf, math.nan):
        assert copy_of(torch.tensor([1.0, value])) is None
    assert copy_of(torch.tensor([255.9])) is not None
    wanted = torch.ones(2, requires_grad=True)
    assert copy_of(wanted) is None  # autograd records it
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
        assert copy_of(dual) is None  # so does forward mode
    for unusual in (torch.ones(65, 64), torch.ones(4)[::2], torch.ones(2, device="meta")):
        assert copy_of(unusual) is None
    assert copy_of(torch.ones(2), torch.float16) is None
    assert copy_of(torch.ones(2, dtype=torch.float64)) is None
    with torch.no_grad():
        assert not copy_of(wanted).requires_grad


def test_twins_in_python_and_cpp_name_each_other():
    package, in_python = Path(ampatch.__file__).parent, set()
    for path in package.rglob("*.py"):
        if path.parent.name == "native" or "In C++: " not in path.read_text():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            for function, header in re.findall(r"In C\+\+: `(\w+)` of `(\w+\.h)`", doc or ""):
                in_python.add((path.relative_to(package).as_posix(), node.name, header, function))
    in_cpp, sources = set(), {name: text.decode() for name, text in loading.sources().items()}
    twin = re.compile(r"In Python: `(?:\w+\.)?(\w+)` of `([\w/]+\.py)`\.\n(?: *//.*\n)*.*?(\w+)\(")
    for header, text in sources.items():
        for function, path, name in twin.findall(text):
            in_cpp.add((path, function, header, name))
    assert in_python == in_cpp
    exported = set(re.findall(r'^    {"(\w+)"', sources["native.cpp"], re.MULTILINE))
    assert exported - {name for *_, name in in_cpp} == {"set_observers"}
