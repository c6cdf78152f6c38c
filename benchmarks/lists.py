"""PyTorch's lists of autocast cases on a device: dtypes under O1 beside those of torch.autocast.

Each case runs as a function and as a method, with arguments in FP32 and in half, under
`torch.autocast` for the device and under ampatch.  Where the dtypes of the results, or whether it
raises, differ, there is a line; so is where the same dtypes have other values than rounding
explains.  ampatch follows autocast for CUDA on every device, so on a CPU, whose autocast has lists
of its own, differences are expected.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from measuring import table
from systems import AUTOCAST
from torch import Tensor
from torch.testing._internal import autocast_test_lists
from torch.utils._pytree import tree_leaves, tree_map

import ampatch as amp

NEAR = {torch.float16: 0.02, torch.bfloat16: 0.1}


class Case(NamedTuple):
    """A call of a list."""

    list_name: str
    function: str
    args: tuple
    kwargs: dict


def cases(device: str) -> list[Case]:
    """All cases of the lists that torch has for the device."""
    torch.manual_seed(0)
    lists = autocast_test_lists
    kind = lists.AutocastCPUTestLists if device == "cpu" else lists.AutocastTestLists
    found = []
    for list_name, entries in vars(kind(torch.device(device))).items():
        for function, args, *more in entries:
            if function == "einsum":  # the list's operands have two dimensions, its equation four
                args = (args, *[operand.reshape(2, 2, 4, 4) for operand in more[0]])
            kwargs = more[0] if more and isinstance(more[0], dict) else {}
            found.append(Case(list_name, function, args, kwargs))
    return found


def forms(case: Case) -> dict[str, Callable]:
    """The function and the method of a case, looked up now: patched or plain."""
    name = case.function.removeprefix("linalg_")
    place = case.list_name.partition("_")[0]
    owners = {"torch": [torch], "nn": [F, torch._C._nn], "linalg": [torch.linalg]}.get(place, [])
    found = {owner.__name__: getattr(owner, name) for owner in owners if hasattr(owner, name)}
    if "torch.nn.functional" in found:
        found.pop("torch._C._nn", None)  # F shows the same function, or one around it
    if hasattr(Tensor, name):
        found["method"] = lambda first, *args, **kwargs: getattr(first, name)(*args, **kwargs)
    return found


def outcome(call: Callable, case: Case, dtype: torch.dtype) -> Any:
    """What a call returns, or the error; its floating arguments in `dtype`."""

    def given(leaf: Any) -> Any:
        is_number = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.detach().clone().to(dtype) if is_number else leaf

    args, kwargs = tree_map(given, (case.args, case.kwargs))
    torch.manual_seed(0)
    try:
        return call(*args, **kwargs)
    except Exception as error:  # of whatever kind: it is the outcome
        return error


def outcomes(chosen: list[Case], half: torch.dtype) -> Iterator[tuple[str, Any]]:
    """Every case in every form with every dtype of arguments."""
    for case, dtype in itertools.product(chosen, (torch.float32, half)):
        for form, call in forms(case).items():
            name = f"{case.list_name}: {case.function} ({form}) of {str(dtype)[6:]}"
            yield name, outcome(call, case, dtype)


def brief(result: Any) -> str:
    """The dtypes of a result, or the kind of the error."""
    if isinstance(result, Exception):
        return type(result).__name__
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return ", ".join(str(leaf.dtype)[6:] for leaf in leaves) or repr(result)


def difference(theirs: Any, ours: Any, half: torch.dtype) -> tuple[str, str] | None:
    """How two outcomes differ, each in words; None: they do not."""
    if isinstance(theirs, Exception) and isinstance(ours, Exception):
        return None
    if brief(theirs) != brief(ours):
        return brief(theirs), brief(ours)
    for one, other in zip(tree_leaves(theirs), tree_leaves(ours), strict=True):
        if isinstance(one, Tensor) and one.is_floating_point():
            gap = (one.double() - other.double()).abs().nan_to_num().max().item()
            if gap > NEAR[half] * max(1.0, one.double().abs().nan_to_num().max().item()):
                return brief(theirs), f"{brief(ours)}, {gap:.2g} away"
    return None


def compare(device: str, dtype: str) -> tuple[int, list[list[str]]]:
    """How many calls there were, and a row for each that differs."""
    half, chosen = getattr(torch, dtype), cases(device)
    with torch.autocast(device, dtype=half):
        theirs = list(outcomes(chosen, half))
    amp.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    try:
        ours = dict(outcomes(chosen, half))
    finally:
        amp.deactivate()
    found = [(name, difference(result, ours[name], half)) for name, result in theirs]
    return len(theirs), [[dtype, name, *told] for name, told in found if told]


def report(options: Namespace) -> Iterator[str]:
    """A line per half type, and a row for each call that differs."""
    warnings.simplefilter("ignore")  # some of the functions are deprecated
    found: list[list[str]] = []
    for dtype in options.dtypes:
        calls, rows = compare(options.device, dtype)
        yield f"{dtype}: {calls} calls, of which {len(rows)} differ."
        found += rows
    if found:
        yield "\n" + table(["half type", "call", f"{AUTOCAST} on {options.device}", "O1"], found)
    if found and options.device == "cuda":  # elsewhere autocast has other lists
        sys.exit(1)
