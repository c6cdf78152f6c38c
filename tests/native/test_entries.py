"""Entries of tables and lists of tensors: natively as in Python, to the bit.

Exchanges all or none: test_casts.py.
"""

import ast
import math
import re
from pathlib import Path

import pytest
import torch
from native_runs import different
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import ampatch
from ampatch import native
from ampatch.models import half_copy_slots
from ampatch.native import loading
from ampatch.scaling import unscaling

needs_native = pytest.mark.skipif(native.part is None, reason="the native part is not active")
A, B, C = object(), object(), object()


def test_one_tensor_goes_to_several_places():
    tables = [{"a": A, "b": B}, {"a": A}]
    every = [tables[0], tables[0], tables[1]], ["a", "b", "a"], [1, 0, 1]
    assert half_copy_slots.set_entries(*every, [B, C], None)
    assert tables == [{"a": C, "b": B}, {"a": C}]
    assert list(tables[0]) == ["a", "b"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
@needs_native
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


# What the native part does with lists of tensors

ODD = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-42, 1e-40, 3.4e38, 6e-8, 65520.0, 1.00390625]
SHAPES = [(), (0,), (1,), (3, 5), (64,), (65,), (70, 70), (2, 3, 4, 5), (300, 300)]


@needs_native
def test_what_is_no_tensor_is_refused() -> None:
    for grads in ([1], (torch.ones(2),), 1):
        with pytest.raises(TypeError):
            native.part.unscale(grads, torch.ones(()))


def numbers(shape: tuple, *, odd: bool = False) -> Tensor:
    """FP32 numbers, some of them where rounding has special cases."""
    values = torch.randn(shape)
    if odd and values.numel() >= len(ODD):
        values.view(-1)[: len(ODD)] = torch.tensor(ODD)
    return values


@needs_native
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("scale", [1.0, 3.0, 65536.0])
def test_gradients_are_unscaled_alike(odd, scale, monkeypatch):
    def unscaled() -> tuple[list[Tensor], bool]:
        torch.manual_seed(0)
        grads = [numbers(shape, odd=odd) for shape in SHAPES] + [numbers((8, 8))[:, ::2]]
        has_inf = unscaling.unscale_(grads, torch.tensor(scale), as_bool=True)
        return grads, has_inf

    natively = unscaled()
    assert natively[1] is odd
    monkeypatch.setattr(unscaling, "_unscale", None)
    assert different(natively, unscaled()) == []


@needs_native
def test_unusual_gradients_are_unscaled_in_python() -> None:
    sparse = torch.eye(3).to_sparse()
    in_graph = torch.ones(3, requires_grad=True) * 2
    is_complex = torch.ones(3, dtype=torch.complex64)
    for unusual in (sparse, in_graph, is_complex, torch.ones(3, device="meta")):
        usual = torch.ones(2)
        assert native.part.unscale([usual, unusual], torch.tensor(2.0)) is None
        assert usual.tolist() == [1, 1]
    unscaling.unscale_([sparse], torch.tensor(2.0), as_bool=True)
    assert sparse.to_dense().trace() == 1.5


@needs_native
def test_nothing_is_unscaled_where_a_mode_looks_on() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert native.part.unscale([torch.ones(2)], torch.tensor(2.0)) is None


@needs_native
def test_memory_that_was_freed_is_an_error_as_in_torch() -> None:
    wide = torch.ones(4)
    wide.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not allocated"):
        native.part.cast_weights([wide, wide], torch.bfloat16, False)
