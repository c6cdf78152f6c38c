"""PyTorch's own lists of autocast cases, run under O1 as its CUDA tests run them under autocast.

Each entry is called as a function, as a method and in place.  What the first two
return has the dtype that the list is for, and equals bit by bit the plain call
with arguments cast by hand.  The in-place form is PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from autocast_oracle import autocast_dtypes, dtypes, outcome, to
from torch import Tensor
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists
from torch.utils._pytree import tree_leaves, tree_map

import ampatch

CASES = {"2.13": 121}
"""How many cases torch has in its lists, by version, so that none goes missing unseen."""

CUDNN = {"cudnn_convolution", "cudnn_convolution_transpose"}


class Entry(NamedTuple):
    """One case of a list: arguments, the dtype to run in, the dtype that comes out."""

    list_name: str
    function: str
    args: tuple
    kwargs: dict
    run_as: torch.dtype | None  # None: the half type
    out: torch.dtype | None


def entries() -> list[Entry]:
    """All cases of the CUDA lists but `banned`, fresh."""
    torch.manual_seed(0)
    found = []
    for list_name, cases in vars(AutocastTestLists(torch.device("cpu"))).items():
        for function, args, *more in cases:
            if list_name == "banned":
                continue
            if function == "einsum":  # the list's operands have two dimensions, its equation four
                args = (args, *[mat.reshape(2, 2, 4, 4) for mat in more[0]])
            run_as = None if list_name.endswith("fp16") else torch.float32
            out = more[0] if list_name.endswith("builtin_promote") else run_as
            kwargs = more[0] if more and isinstance(more[0], dict) else {}
            found.append(Entry(list_name, function, args, kwargs, run_as, out))
    return found


PLACES = {"torch": [torch], "nn": [torch._C._nn, F], "linalg": [torch.linalg], "methods": []}
RE_EXPORTED = {name for name, value in vars(F).items() if value is getattr(torch._C._nn, name, 0)}
"""Builtins of `torch._C._nn` that F shows as its own: F has the patch, what is below is torch's."""


def forms(entry: Entry) -> dict[str, Callable]:
    """The entry's function and method, looked up now: patched or plain."""
    name = entry.function.removeprefix("linalg_")
    found = {
        place.__name__: getattr(place, name)
        for place in PLACES[entry.list_name.partition("_")[0]]
        if hasattr(place, name) and (place is F or name not in RE_EXPORTED)
    }
    if hasattr(Tensor, name):
        found["method"] = lambda first, *args, **kwargs: getattr(first, name)(*args, **kwargs)
    return found


@pytest.fixture(autouse=True)
def quiet(recwarn):
    """`__div__`, chain_matmul and others of the lists are deprecated."""


def run_all(half: torch.dtype) -> list[tuple[str, str, Any]]:
    """Every entry's list, function and error (None), checked as a function and as a method."""
    found = []
    kernels = [entry for entry in entries() if entry.function in CUDNN]
    found += [(*entry[:2], outcome(_run_without_kernel, entry, half)) for entry in kernels]
    chosen = [entry for entry in entries() if entry.function not in CUDNN]
    plain = [outcome(by_hand, entry, half) for entry in chosen]
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    found += [
        (*entry[:2], outcome(check, entry, half, results))
        for entry, results in zip(chosen, plain, strict=True)
    ]
    ampatch.deactivate()
    return found


def by_hand(entry: Entry, half: torch.dtype) -> dict[str, Any]:
    """What each form returns in plain PyTorch, its arguments cast by hand."""
    args = to(entry.run_as or half, for_half(entry.args, half))
    return {form: function(*args, **entry.kwargs) for form, function in forms(entry).items()}


def check(entry: Entry, half: torch.dtype, plain: Any) -> None:
    """Compare each form's result, and its dtype, with the plain one."""
    if isinstance(plain, Exception):
        raise plain
    assert plain
    args = for_half(entry.args, half)
    for form, function in forms(entry).items():
        result = function(*args, **entry.kwargs)
        if isinstance(result, Tensor):
            assert result.dtype is (entry.out or half), form
        _assert_same(result, plain[form])


def for_half(args: Any, half: torch.dtype) -> Any:
    """A list's arguments with `half` in the place of its own half type."""
    return tree_map(
        lambda leaf: (
            leaf.to(half)
            if isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
            else leaf
        ),
        args,
    )


def _assert_same(result: Any, plain: Any) -> None:
    for new, old in zip(tree_leaves(result), tree_leaves(plain), strict=True):
        assert type(new) is type(old)
        if isinstance(old, Tensor):
            torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
        else:
            assert new == old


def _run_without_kernel(entry: Entry, half: torch.dtype) -> None:
    """cuDNN's own: nothing runs without a GPU, so a probe in its place shows what it is given."""
    given: list = []
    original = getattr(torch, entry.function)
    setattr(torch, entry.function, lambda *args: given.extend(args))
    try:
        ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
        getattr(torch, entry.function)(*entry.args)
        ampatch.deactivate()
    finally:
        setattr(torch, entry.function, original)
    _assert_same(tuple(given), to(half, entry.args))


def run_banned(half: torch.dtype) -> int:
    """The banned cases: refused where an argument is half, where autocast refuses even FP32."""
    cases = AutocastTestLists(torch.device("cpu")).banned
    plain = [getattr(module, function)(*args) for function, args, module in cases]
    ampatch.initialize(
        [], opt_level="O1", dtype=half, allow_banned=False, patch_scope="process", verbosity=0
    )
    for (function, args, module), expected in zip(cases, plain, strict=True):
        assert torch.equal(getattr(module, function)(*args), expected)
        with pytest.raises(NotImplementedError, match=function):
            getattr(module, function)(*to(half, args))
    ampatch.deactivate()
    return len(cases)


def test_every_case_of_torchs_lists(half):
    results = run_all(half)
    assert [result for result in results if result[-1] is not None] == []
    number = sum(map(len, vars(AutocastTestLists(torch.device("cpu"))).values()))
    passed = len(results) + run_banned(half)
    expected = CASES.get(".".join(torch.__version__.split(".")[:2]), number)
    assert f"{passed} of {number}" == f"{expected} of {expected}"


def in_place_name(name: str) -> str:
    """`exp_` of `exp`, `__ipow__` of `__pow__`."""
    return f"__i{name[2:]}" if name.startswith("__") else f"{name}_"


INTO = {"index_put", "scatter_add"}
"""In place their values are cast to the dtype that is written into, which a mixture needs: PyTorch
refuses it, and autocast with it."""

IN_PLACE = [
    (entry.list_name, entry.function)
    for entry in entries()
    if hasattr(Tensor, in_place_name(entry.function))
]


@pytest.mark.parametrize("given", ["float32", "half", "as listed"])
def test_in_place_forms_are_pytorchs_own(given, half):
    """Same tensor, dtype and value, or the same refusal, with patches and without.

    Those of `INTO` are as PyTorch's with their values cast by hand.
    """
    assert {"exp", "addmm", "__pow__", "add", *INTO} <= {name for _, name in IN_PLACE}
    dtype = {"float32": torch.float32, "half": half}.get(given)

    def call(entry: Entry, by_hand: bool = False) -> Any:
        first, *rest = for_half(entry.args, half) if dtype is None else to(dtype, entry.args)
        first = first.clone()
        rest = to(first.dtype, rest) if by_hand else rest
        result = outcome(getattr(first, in_place_name(entry.function)), *rest, **entry.kwargs)
        assert result is first or isinstance(result, Exception)
        return repr(result) if isinstance(result, Exception) else result

    chosen = [entry for entry in entries() if (entry.list_name, entry.function) in IN_PLACE]
    plain = [call(entry, by_hand=entry.function in INTO) for entry in chosen]
    assert sum(isinstance(result, Tensor) for result in plain) > len(plain) / 2
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    for entry, old in zip(chosen, plain, strict=True):
        _assert_same(call(entry), old)


def cpu_cases() -> list[tuple[str, str, tuple, dict]]:
    """The lists for autocast on CPU, flattened: more functions, and arguments in bfloat16."""
    torch.manual_seed(0)
    return [
        (list_name, function, args, more[0] if more and isinstance(more[0], dict) else {})
        for list_name, cases in vars(AutocastCPUTestLists(torch.device("cpu"))).items()
        for function, args, *more in cases
        if function != "binary_cross_entropy"  # autocast refuses it on CUDA; see run_banned
    ]


@pytest.mark.parametrize("given", ["float32", "half"])
def test_cases_of_the_cpu_lists_follow_the_policy_for_cuda(given, half):
    """There autocast differs; here one policy counts on every device."""
    dtype = torch.float32 if given == "float32" else half
    chosen = [
        Entry(list_name, function, to(dtype, args), kwargs, None, None)
        for list_name, function, args, kwargs in cpu_cases()
        if (function, given) != ("avg_pool3d", "half")  # FP32 on the CPU, which lacks the kernel
    ]
    expected = [
        {
            form: autocast_dtypes(half, call, *entry.args, **entry.kwargs)
            for form, call in forms(entry).items()
        }
        for entry in chosen
    ]
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    for entry, by_form in zip(chosen, expected, strict=True):
        for form, function in forms(entry).items():
            found = dtypes(function(*entry.args, **entry.kwargs))
            assert found == by_form[form], (entry.function, form)
    assert len({entry.function for entry in chosen}) > 40
