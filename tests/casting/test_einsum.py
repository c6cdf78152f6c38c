"""`torch.einsum`: products that are contracted run in half, sums and products of elements do not.

Autocast for the CPU takes an equation apart, and is the oracle; that for CUDA has no FP32 here.
"""

import itertools
import re

import torch
from op_samples import r

import ampatch

EQUATIONS = [
    *("ij,jk", "ij,kj->ki", "bcij,bcjk->bik", "...ij,...jk", "...ij,...ij->...", "ij,ij->"),
    *("ii,i->", "i,ij,j->", "ij,jk,kl->il", "bi,bj,ij->b"),  # every operand is contracted
    *("i,j->ij", "i,j", "bi,j->bij", "... i , j -> ... i j", "bi,bi->bi", "ij,j->ij", "ii,i->i"),
    *("ii->i", "ij->ji", "...ij->...ji", "i,j,k->ijk", "ij,jk,k->ik"),
    *("bi->b", "ii", "...i->...", "ij,k->k", "ij,kl->ik"),  # sums
]


def operands(equation: str) -> list[torch.Tensor]:
    sizes = {"...": (2, 3), **{label: (2 + number,) for number, label in enumerate("ijklbc")}}
    parts = equation.replace(" ", "").partition("->")[0].split(",")
    labels = [re.findall(r"\.\.\.|\w", part) for part in parts]
    return [r(*itertools.chain(*[sizes[label] for label in part])) for part in labels]


def test_it_computes_in_the_dtypes_of_its_products_and_sums(half):
    cases = [(equation, operands(equation)) for equation in EQUATIONS]
    with torch.autocast("cpu", half):
        theirs = [torch.einsum(equation, *inputs).dtype for equation, inputs in cases]
    plain = [torch.einsum(equation, *inputs) for equation, inputs in cases]
    assert {half, torch.float32} == set(theirs)
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    for (equation, inputs), dtype, expected in zip(cases, theirs, plain, strict=True):
        for args in (inputs, [x.to(half) for x in inputs]):
            result = torch.einsum(equation, *args)
            torch.testing.assert_close(result.float(), expected, rtol=0.03, atol=0.03)
        wide = torch.einsum(equation, *inputs)
        assert wide.dtype is dtype, equation
        assert dtype is half or torch.equal(wide, expected), equation
        if len(inputs) > 1 and dtype is torch.float32:
            result = torch.einsum(equation, [inputs[0].to(half), *inputs[1:]])
            assert result.dtype is torch.float32, equation


def test_by_numbers_of_labels(half):
    x, y = r(4, 4), r(4, 4)
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    assert torch.einsum(x, [0, 1], y, [1, 2], [2, 0]).dtype is half
    assert torch.einsum(x, [..., 0], y, [..., 0], [..., 0]).dtype is torch.float32
    assert torch.einsum(x, [0, 0]).dtype is torch.float32


def test_a_sum_of_half_numbers_does_not_overflow(half):
    threes = torch.full((2, 100_000), 3.0, dtype=half)
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    assert torch.einsum("bn->b", threes).tolist() == [300_000.0] * 2
