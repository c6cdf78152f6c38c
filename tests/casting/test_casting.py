"""Every listed function, called as its row says, against PyTorch's own autocast for CUDA."""

from __future__ import annotations

import warnings
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
PLACE_IDS = [f"{where}.{name}" for where, name, _ in PLACES]
FLOATS = {Rule.FLOAT, Rule.FLOAT_UNLESS_DTYPE, Rule.FLOAT_UNLESS_SAME_SIZE}
PROMOTES = {Rule.PROMOTE, Rule.PROMOTE_UNLESS_SCALAR}


@pytest.fixture
def o1(half):
    """Casting in force for the whole process."""
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)


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


@pytest.fixture(scope="module", autouse=True)
def autocasts() -> dict:
    """What autocast returns for each place; made once, before any test (torch scripts there)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            (where, name, given, half): expected_dtypes(where, name, rule, given, half)
            for where, name, rule in PLACES
            for given in GIVEN
            for half in GIVEN[1:]
            if name not in NO_ORACLE
        }


@pytest.mark.filterwarnings("ignore:.* is deprecated")
@pytest.mark.parametrize("where, name, rule", PLACES, ids=PLACE_IDS)
def test_dtype_is_autocasts(where, name, rule, half, autocasts):
    if name in ("cudnn_convolution", "cudnn_convolution_transpose"):
        pytest.skip("not even its shape function runs without CUDA")
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    for given in GIVEN:
        args, kwargs = to(given, sample(where, name))
        if name in NO_CPU_KERNEL:
            with FakeTensorMode():
                found = dtypes(call(where, name, *on_fake_cuda((args, kwargs))))
        else:
            found = dtypes(call(where, name, args, kwargs))
        word = half if rule in (Rule.HALF, Rule.HALF_IF_FIRST) else given
        expected = autocasts.get((where, name, given, half)) or [word] * len(found)
        assert found == expected, given


@pytest.mark.filterwarnings("ignore:.* is deprecated")
@pytest.mark.parametrize("where, name, rule", PLACES, ids=PLACE_IDS)
def test_values_are_near_the_fp32_reference(where, name, rule, half, o1):
    if name in NO_CPU_KERNEL:
        pytest.skip("no CPU kernel")
    args, kwargs = sample(where, name)
    with ampatch.disable_casts():
        reference = call(where, name, args, kwargs)
    found = call(where, name, args, kwargs)
    exact = rule in FLOATS | PROMOTES
    for new, old in zip(tree_leaves(found), tree_leaves(reference), strict=True):
        if exact:
            assert torch.equal(new, old)
        else:
            tolerance = 0.04 if half is torch.float16 else 0.2
            torch.testing.assert_close(new.float(), old, rtol=tolerance, atol=tolerance)


UNTOUCHED = [torch.float64, torch.complex64, torch.int64, torch.bool]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where, name, rule", PLACES, ids=PLACE_IDS)
def test_other_dtypes_are_untouched(where, name, rule):
    """Same result, or the same refusal, as without us."""
    if name in NO_CPU_KERNEL:
        pytest.skip("no CPU kernel")
    calls = [to(dtype, sample(where, name)) for dtype in UNTOUCHED]

    def outcome(args: tuple, kwargs: dict) -> Any:
        try:
            return tree_leaves(call(where, name, args, kwargs))
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            return str(error)

    plains = [outcome(*arguments) for arguments in calls]
    assert any(not isinstance(plain, str) for plain in plains)
    ampatch.initialize([], opt_level="O1", dtype=torch.bfloat16, patch_scope="process", verbosity=0)
    for arguments, plain in zip(calls, plains, strict=True):
        patched = outcome(*arguments)
        if isinstance(plain, str):
            assert patched == plain
            continue
        for new, old in zip(patched, plain, strict=True):
            assert new.dtype is old.dtype
            torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
