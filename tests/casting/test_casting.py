"""Every listed function, called as its row says, against PyTorch's own autocast for CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from autocast_oracle import NoAnswer, autocast_dtypes, dtypes, on_fake_cuda, to
from op_samples import NO_CPU_KERNEL, NO_ORACLE, call, sample
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import ampatch
from ampatch.casting.places import has, resolve
from ampatch.casting.tables import BLACKLIST, PROMOTE, WHITELIST, Rule

PLACES = [
    (row.where, name, row.rule)
    for row in (*WHITELIST, *BLACKLIST, *PROMOTE)
    for name in row.names
    if not row.native and has(row.where, name)
]
FLOATS = {Rule.FLOAT, Rule.FLOAT_UNLESS_DTYPE}
PROMOTES = {Rule.PROMOTE}
NO_SHAPE_FUNCTION = {"cudnn_convolution", "cudnn_convolution_transpose"}
"""Not even that runs without CUDA."""


def expected_dtypes(where: str, name: str, rule: Rule, given: torch.dtype, half) -> list | None:
    """What autocast for CUDA returns; None where its oracle has no answer without a GPU."""
    args, kwargs = to(given, sample(where, name))
    if rule in PROMOTES and given not in (torch.float32, half):
        return None  # autocast refuses the other half type
    try:
        return autocast_dtypes(half, getattr(resolve(where), name), *args, **kwargs)
    except NoAnswer:
        return None


GIVEN = (torch.float32, torch.float16, torch.bfloat16)
UNTOUCHED = (torch.float64, torch.complex64, torch.int64, torch.bool)


def result(where: str, name: str, given: torch.dtype) -> Any:
    """What a place returns for its sample in a dtype, or the words in which it refuses."""
    args, kwargs = to(given, sample(where, name))
    try:
        return tree_leaves(call(where, name, args, kwargs))
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        return str(error)


@pytest.mark.filterwarnings("ignore")
def test_every_row_has_autocasts_dtypes_and_values_near_fp32s(half):
    """What FP32 rules compute equals FP32; other dtypes have plain PyTorch's result or words."""
    says = {
        (place, given): None if place[1] in NO_ORACLE else expected_dtypes(*place, given, half)
        for place in PLACES
        for given in GIVEN
    }
    with_kernel = [place for place in PLACES if place[1] not in NO_CPU_KERNEL]
    dtypes_of = (torch.float32, *UNTOUCHED)
    plain = {
        (place, given): result(*place[:2], given) for place in with_kernel for given in dtypes_of
    }
    assert all(
        any(not isinstance(plain[place, given], str) for given in UNTOUCHED)
        for place in with_kernel
    )
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    wrong = [
        (place, given, found)
        for (place, given), autocasts in says.items()
        if (found := complaint_about_dtypes(*place, given, half, autocasts)) is not None
    ]
    for (where, name, rule), given in plain:
        found = result(where, name, given)
        exact = given in UNTOUCHED or rule in FLOATS | PROMOTES
        room = 0.0 if exact else 0.04 if half is torch.float16 else 0.2
        if not near(found, plain[(where, name, rule), given], room, given in UNTOUCHED):
            wrong.append(((where, name), given, found))
    assert wrong == []


def complaint_about_dtypes(
    where: str, name: str, rule: Rule, given: torch.dtype, half: torch.dtype, autocasts: list | None
) -> list | None:
    """The dtypes of what a place returns, if they are not those of autocast or of its rule."""
    if name in NO_SHAPE_FUNCTION:
        return None
    args, kwargs = to(given, sample(where, name))
    if name in NO_CPU_KERNEL:
        with FakeTensorMode():
            found = dtypes(call(where, name, *on_fake_cuda((args, kwargs))))
    else:
        found = dtypes(call(where, name, args, kwargs))
    float_too = (Rule.FLOAT, Rule.FLOAT_ON_CPU)
    word = half if rule is Rule.HALF else torch.float32 if rule in float_too else given
    return None if found == (autocasts or [word] * len(found)) else found


def near(found: Any, plain: Any, room: float, same_dtype: bool) -> bool:
    if isinstance(found, str) or isinstance(plain, str):
        return found == plain
    return len(found) == len(plain) and all(
        (new.dtype is old.dtype or not same_dtype)
        and torch.allclose(new.to(old.dtype), old, rtol=room, atol=room, equal_nan=True)
        for new, old in zip(found, plain, strict=True)
    )
