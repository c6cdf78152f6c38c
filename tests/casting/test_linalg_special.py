"""torch.linalg and torch.special, name by name: those with a row, and those with none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from autocast_oracle import autocast_dtypes, check_like_autocast, dtypes, mixed, outcome, to
from op_samples import r
from torch.utils._pytree import tree_leaves

import ampatch
from ampatch.casting.tables import BEYOND, BLACKLIST, PROMOTE, WHITELIST


def well(*batch: int) -> torch.Tensor:
    """Symmetric positive definite, far from singular."""
    half = r(*batch, 4, 4)
    return half @ half.mT + 2 * torch.eye(4)


def lu() -> tuple:
    return torch.linalg.lu_factor(well())


LINALG = {  # arguments of every function
    **{
        name: (well(),)
        for name in (
            "cholesky",
            "cholesky_ex",
            "cond",
            "det",
            "eig",
            "eigh",
            "eigvals",
            "eigvalsh",
            "inv",
            "inv_ex",
            "ldl_factor",
            "ldl_factor_ex",
            "lu",
            "lu_factor",
            "lu_factor_ex",
            "matrix_exp",
            "matrix_norm",
            "matrix_rank",
            "matrix_sqrth",
            "polar",
            "norm",
            "pinv",
            "qr",
            "slogdet",
            "svd",
            "svdvals",
            "vector_norm",
            "diagonal",
        )
    },
    "cross": (r(2, 3), r(2, 3)),
    "householder_product": (r(4, 3), r(3)),
    "ldl_solve": (*torch.linalg.ldl_factor(well()), r(4, 2)),
    "lstsq": (r(5, 3), r(5, 2)),
    "lu_solve": (*lu(), r(4, 2)),
    "matmul": (r(4, 4), r(4, 4)),
    "matrix_power": (r(4, 4), 3),
    "multi_dot": ([r(4, 4), r(4, 4)],),
    "solve": (well(), r(4, 2)),
    "solve_ex": (well(), r(4, 2)),
    "solve_triangular": (well(), r(4, 2)),
    "tensorinv": (r(6, 2, 3) + torch.eye(6).reshape(6, 2, 3), 1),
    "vander": (r(4),),
    "tensorsolve": (well(), r(4)),
    "vecdot": (r(4, 4), r(4, 4)),
}
KEYWORDS = {"solve_triangular": {"upper": True}}
WITH_DEGREE = {
    f"{kind}_polynomial_{letter}"
    for kind, letters in {
        "chebyshev": "tuvw",
        "shifted_chebyshev": "tuvw",
        "hermite": ["h", "he"],
        "laguerre": "l",
        "legendre": "p",
    }.items()
    for letter in letters
}
SPECIAL = {  # what is not a function of one tensor
    **{name: (r(4), torch.tensor(3)) for name in WITH_DEGREE},
    **{name: (r(4), -1) for name in ("softmax", "log_softmax", "logsumexp")},
    **{name: (r(4), r(4)) for name in ("gammainc", "gammaincc", "xlogy", "xlog1py")},
    "multigammaln": (r(4) + 2, 2),
    "polygamma": (1, r(4)),
    "zeta": (r(4) + 2, r(4)),
}
ROWS = {
    (row.where, name): row.rule for row in (*WHITELIST, *BLACKLIST, *PROMOTE) for name in row.names
}


def public(module: Any) -> list[str]:
    """The module's functions: what it lists beside classes and private names."""
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and not isinstance(value, type) and not name.startswith("_")
    ]


CASES = [
    *[(torch.linalg, name) for name in public(torch.linalg)],
    *[(torch.special, name) for name in public(torch.special)],
]
BEYOND_ROWS = {(row.where, name) for row in BEYOND for name in row.names}
LISTED = [case for case in CASES if (case[0].__name__, case[1]) in ROWS]
OURS = [case for case in CASES if (case[0].__name__, case[1]) in BEYOND_ROWS]
UNLISTED = [case for case in CASES if case not in LISTED and case not in OURS]


def arguments(module: Any, name: str) -> tuple:
    """The sample of one function; a KeyError tells of a function of torch.linalg without one."""
    return LINALG[name] if module is torch.linalg else SPECIAL.get(name, (r(4),))


def test_both_kinds_are_many():
    assert len(LISTED) > 12 and len(UNLISTED) > 45 and len(OURS) > 30


@pytest.mark.parametrize("module, name", LISTED, ids=[name for _, name in LISTED])
def test_with_a_row(module, name, half):
    args = arguments(module, name)
    check_like_autocast(lambda *args: getattr(module, name)(*args), args, half)


@pytest.mark.parametrize("module, name", OURS, ids=[name for _, name in OURS])
def test_beyond_autocast(module, name, half):
    """In FP32 on half and on mixtures, which PyTorch refuses; FP32 and float64 as in PyTorch."""
    args = arguments(module, name)

    def call(*args: Any) -> Any:
        return getattr(module, name)(*args, **KEYWORDS.get(name, {}))

    ways = {
        "float32": args,
        "half": to(half, args),
        "mixed": mixed(half, args),
        "float64": to(torch.float64, args),
    }
    plain = {
        way: outcome(call, *(to(torch.float32, given) if way in ("half", "mixed") else given))
        for way, given in ways.items()
    }
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    for way, given in ways.items():
        found = outcome(call, *given)
        assert not isinstance(found, Exception), (way, found)
        if name == "cross" and way == "half":  # which promotes, and has a kernel for half
            assert dtypes(found) == [half]
            continue
        for new, old in zip(tree_leaves(found), tree_leaves(plain[way]), strict=True):
            assert new.dtype is old.dtype
            torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("module, name", UNLISTED, ids=[name for _, name in UNLISTED])
def test_without_a_row(module, name, half):
    """What PyTorch gives, or its refusal; and for FP32 that is autocast's dtype too."""
    args = arguments(module, name)

    def call(*args: Any) -> Any:
        return getattr(module, name)(*args, **KEYWORDS.get(name, {}))

    ways = {
        "float32": args,
        "half": to(half, args),
        "mixed": mixed(half, args),
        "float64": to(torch.float64, args),
    }
    plain = {way: outcome(call, *given) for way, given in ways.items()}
    assert not isinstance(plain["float32"], Exception)
    if name != "lstsq":  # the shape of its result depends on values, of which the oracle has none
        assert dtypes(plain["float32"]) == autocast_dtypes(half, call, *args)
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    rounding = 1e-5 if module is torch.linalg else 0  # LAPACK's depends on where memory lies
    for way, given in ways.items():
        found = outcome(call, *given)
        if isinstance(plain[way], Exception):
            assert repr(found) == repr(plain[way]), way
            continue
        for new, old in zip(tree_leaves(found), tree_leaves(plain[way]), strict=True):
            assert new.dtype is old.dtype
            torch.testing.assert_close(new, old, rtol=rounding, atol=rounding, equal_nan=True)
