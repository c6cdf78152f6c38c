"""PyTorch's own lists of autocast cases, run under O1 as its CUDA tests run them under autocast.

Each entry is called as a function and as a method.  The result has the dtype that the list is for,
and equals bit by bit the plain call with arguments cast by hand.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from autocast_oracle import outcome, to
from torch import Tensor
from torch.testing._internal.autocast_test_lists import AutocastTestLists
from torch.utils._pytree import tree_leaves, tree_map

import ampatch

FEWEST = 120
"""How many cases torch has in its lists at least, so that none goes missing unseen."""

CUDNN = {"cudnn_convolution", "cudnn_convolution_transpose"}
FLOAT_INSIDE = {"addbmm"}
"""What sums in half on the CPU: the sum of half matrices in FP32, in half."""


class Entry(NamedTuple):
    """One case of a list: arguments, the dtype to run in, the dtype that comes out."""

    list_name: str
    function: str
    args: tuple
    kwargs: dict
    run_as: torch.dtype | None  # None: the half dtype
    out: torch.dtype | None


def entries() -> list[Entry]:
    """All cases of the CUDA lists but `banned`, fresh."""
    torch.manual_seed(0)
    entries = []
    for list_name, cases in vars(AutocastTestLists(torch.device("cpu"))).items():
        for function, args, *more in cases if list_name != "banned" else ():
            if function == "einsum":  # the list's operands have two dimensions, its equation four
                args = (args, *[mat.reshape(2, 2, 4, 4) for mat in more[0]])
            run_as = None if list_name.endswith("fp16") else torch.float32
            out = more[0] if list_name.endswith("builtin_promote") else run_as
            kwargs = more[0] if more and isinstance(more[0], dict) else {}
            entries.append(Entry(list_name, function, args, kwargs, run_as, out))
    return entries


PLACES = {"torch": [torch], "nn": [torch._C._nn, F], "linalg": [torch.linalg], "methods": []}
RE_EXPORTED = {name for name, value in vars(F).items() if value is getattr(torch._C._nn, name, 0)}
"""Builtins of `torch._C._nn` that F shows as its own: F has the patch, what is below is torch's."""


def forms(entry: Entry) -> dict[str, Callable]:
    """The entry's function and method, looked up now: patched or plain."""
    name = entry.function.removeprefix("linalg_")
    calls = {
        place.__name__: getattr(place, name)
        for place in PLACES[entry.list_name.partition("_")[0]]
        if hasattr(place, name) and (place is F or name not in RE_EXPORTED)
    }
    if hasattr(Tensor, name):
        calls["method"] = lambda first, *args, **kwargs: getattr(first, name)(*args, **kwargs)
    return calls


def by_hand(entry: Entry, half: torch.dtype) -> dict[str, Any]:
    """What each form returns in plain PyTorch, its arguments cast by hand."""
    args = to(entry.run_as or half, for_half(entry.args, half))
    if entry.function in FLOAT_INSIDE:
        args = to(torch.float32, args)
    results = {form: function(*args, **entry.kwargs) for form, function in forms(entry).items()}
    return to(half, results) if entry.function in FLOAT_INSIDE else results


def for_half(args: Any, half: torch.dtype) -> Any:
    """A list's arguments with `half` in the place of its own half dtype."""
    halves = (torch.float16, torch.bfloat16)
    return tree_map(
        lambda leaf: leaf.to(half) if getattr(leaf, "dtype", None) in halves else leaf, args
    )


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
        assert_same(result, plain[form])


def assert_same(result: Any, plain: Any) -> None:
    for new, old in zip(tree_leaves(result), tree_leaves(plain), strict=True):
        assert type(new) is type(old)
        if isinstance(old, Tensor):
            torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
        else:
            assert new == old


def start(half: torch.dtype, **options: Any) -> None:
    ampatch.initialize(
        [], opt_level="O1", dtype=half, patch_scope="process", verbosity=0, **options
    )


def check_without_kernel(entry: Entry, half: torch.dtype) -> None:
    """cuDNN's own: nothing runs without a GPU, so a probe in its place shows what it is given."""
    received: list = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, entry.function, lambda *args: received.extend(args))
        start(half)
        getattr(torch, entry.function)(*entry.args)
        ampatch.deactivate()
    assert_same(tuple(received), to(half, entry.args))


def check_banned(half: torch.dtype) -> int:
    """The banned cases: refused where an argument is half, where autocast refuses even FP32."""
    cases = AutocastTestLists(torch.device("cpu")).banned
    plain = [getattr(module, function)(*args) for function, args, module in cases]
    start(half, allow_banned=False)
    for (function, args, module), expected in zip(cases, plain, strict=True):
        assert torch.equal(getattr(module, function)(*args), expected)
        with pytest.raises(NotImplementedError, match=function):
            getattr(module, function)(*to(half, args))
    return len(cases)


@pytest.mark.filterwarnings("ignore")  # `__div__`, chain_matmul and others are deprecated
def test_every_case_of_torchs_lists(half):
    results = {
        entry.function: outcome(check_without_kernel, entry, half)
        for entry in entries()
        if entry.function in CUDNN
    }
    chosen = [entry for entry in entries() if entry.function not in CUDNN]
    plain = [outcome(by_hand, entry, half) for entry in chosen]
    start(half)
    for entry, expected in zip(chosen, plain, strict=True):
        results[f"{entry.list_name} {entry.function} {len(results)}"] = outcome(
            check, entry, half, expected
        )
    ampatch.deactivate()
    assert {name: result for name, result in results.items() if result is not None} == {}
    number = sum(map(len, vars(AutocastTestLists(torch.device("cpu"))).values()))
    assert len(results) + check_banned(half) == number >= FEWEST
