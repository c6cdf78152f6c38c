"""How a call is made: `dtype=`, containers, weights, two half dtypes, exponents, `torch.einsum`."""

import itertools
import re
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from op_samples import r
from small_training import Made
from torch import nn

import ampatch
from ampatch.casting.places import resolve


def start(half, **options):
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", **options)


WITH_DTYPE = [
    lambda x, dtype: torch.softmax(x, -1, dtype=dtype),
    lambda x, dtype: torch.softmax(x, -1, dtype),
    lambda x, dtype: F.softmax(x, -1, dtype=dtype),
    lambda x, dtype: x.log_softmax(-1, dtype),
    lambda x, dtype: x.sum(dtype=dtype),
    lambda x, dtype: torch.cumsum(x, 0, dtype=dtype),
    lambda x, dtype: torch.norm(x, dtype=dtype),
    lambda x, dtype: torch.norm(x, 2, 1, False, None, dtype),
    lambda x, dtype: torch.linalg.vector_norm(x, dtype=dtype),
]


def test_an_explicit_dtype_wins(half):
    start(half, verbosity=0)
    x = torch.rand(3, 4).to(half)
    for call in WITH_DTYPE:
        assert call(x, half).dtype is half
        assert call(x, torch.float64).dtype is torch.float64
        assert call(x, None).dtype is torch.float32


def test_an_explicit_out_of_none_is_no_out(half):
    """Wrappers pass `out=None` on; the cast must not be lost to it."""
    start(half, verbosity=0)
    full, out = torch.full((2, 2), 0.1), torch.zeros(2, 2)
    assert torch.mm(full, full, out=None).dtype is half
    assert torch.linalg.matrix_power(full, 2, out=None).dtype is half
    with ampatch.disable_casts():
        expected = full @ full
    assert torch.mm(full, full, out=out) is out and torch.equal(out, expected)


Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize("container", [list, tuple, lambda items: Pair(*items)])
def test_containers_are_cast_inside_and_left_alone(container):
    seen, half = [], torch.bfloat16
    start(half, verbosity=0)

    @ampatch.half_function
    def probe(items, *, more):
        seen.extend((items, more))

    inner = container([torch.ones(2), torch.ones(2, dtype=torch.int64)])
    items, more = container([torch.ones(2), inner]), {"more": [torch.ones(2)]}
    before = more["more"]
    probe(items, **more)
    cast_items, cast_more = seen
    assert type(cast_items) is type(items) and type(cast_items[1]) is type(inner)
    assert cast_items[0].dtype is half and cast_items[1][0].dtype is half
    assert cast_items[1][1] is inner[1] and cast_more[0].dtype is half
    assert items[0].dtype is torch.float32 and items[1] is inner
    assert more["more"] is before and before[0].dtype is torch.float32


def test_promote_is_to_the_widest(half):
    start(half, verbosity=0)
    wide, narrow = torch.rand(3), torch.rand(3).to(half)
    other = narrow.to(torch.bfloat16 if half is torch.float16 else torch.float16)
    assert torch.dot(narrow, wide).dtype is torch.float32
    assert torch.dot(narrow, narrow).dtype is half
    assert torch.dot(narrow, other).dtype is torch.float32
    with pytest.raises(RuntimeError):
        torch.dot(narrow, wide.double())  # as PyTorch: float64 is no business of ours


def test_bce_runs_in_fp32_with_one_warning_or_is_refused(half, caplog):
    start(half)
    p, target = torch.full((4,), 0.9995).to(half), torch.ones(4).to(half)
    with caplog.at_level("WARNING", logger="ampatch"):
        losses = [F.binary_cross_entropy(p, target) for _ in range(3)]
    assert all(value.dtype is torch.float32 for value in losses)
    assert losses[0] == F.binary_cross_entropy(p.float(), target.float())
    texts = [entry.getMessage() for entry in caplog.records]
    assert len(texts) == 1 and "binary_cross_entropy_with_logits" in texts[0]
    ampatch.deactivate()
    start(half, allow_banned=False, verbosity=0)
    assert F.binary_cross_entropy(p.float(), target.float()).dtype is torch.float32
    with pytest.raises(NotImplementedError, match="BCEWithLogitsLoss"):
        F.binary_cross_entropy(p, target)
    with ampatch.disable_casts():  # as in backward hooks: nothing is cast, so nothing is refused
        assert F.binary_cross_entropy(p, target).dtype is half


@pytest.mark.parametrize("where", ["torch", "torch.Tensor", "torch.linalg"])
def test_the_exponent_of_a_matrix_power(where, half):
    """Values are compared in `test_op_db_listed.py`."""
    start(half, verbosity=0)
    power, matrix = resolve(where).matrix_power, torch.eye(3)
    for n in (0, 1, 2, 5, -1, -3):
        expected = half if n > 1 else torch.float32
        assert power(matrix, n).dtype is power(matrix, n=n).dtype is expected
        assert power(matrix.to(half), n).dtype is (torch.float32 if n < 0 else half)


H = torch.bfloat16
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def managed(module, **options):
    return ampatch.initialize(module, opt_level="O1", dtype=H, verbosity=0, **options)


def calling(what):
    """A model that calls `what(self, x)` with a weight and a bias at hand."""
    weights = {"weight": nn.Parameter(torch.randn(5, 4)), "bias": nn.Parameter(torch.randn(5))}
    return Made(what, **weights)


def plain(self, x):
    return F.linear(x, self.weight, self.bias)


WAYS = {  # what is called, and the dtype that comes out
    "no bias": (lambda self, x: F.linear(x, self.weight), H),
    "half already": (lambda self, x: F.linear(x.to(H), self.weight, self.bias), H),
    "keywords": (lambda self, x: F.linear(input=x, weight=self.weight, bias=self.bias), H),
    "a weight that is no parameter": (lambda self, x: F.linear(x, 1 * self.weight), H),
    "a bias that is no parameter": (lambda self, x: F.linear(x, self.weight, 1 * self.bias), H),
    "casts off": (ampatch.disable_casts()(plain), torch.float32),
    "all in float": (ampatch.precision("float")(plain), torch.float32),
    "float16 input": (lambda self, x: plain(self, x.half()), H),
    "a parameter for input": (lambda self, x: F.linear(self.weight, self.weight), H),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_call_computes_what_autocast_does(name):
    what, dtype = WAYS[name]
    model = managed(calling(what))
    model(X)
    output = model(X)  # from now on the weights are cast together
    assert output.dtype is dtype
    ampatch.deactivate()
    with torch.autocast("cpu", dtype=H, enabled=dtype is H):
        assert torch.equal(output, (what if dtype is H else plain)(model, X))


def test_overrides_of_the_function_win():
    def another_first(self, x):
        torch.mm(self.weight, x.t())  # makes a half copy of the weight
        return F.linear(x, self.weight)

    model = managed(calling(another_first), overrides={F.linear: "float"})
    for _ in range(2):
        assert model(X).dtype is torch.float32


def test_missing_arguments_are_named_as_the_function_is():
    managed(calling(plain))
    with pytest.raises(TypeError, match=r"linear\(\) missing 1 required .*weight"):
        F.linear(X)


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


def test_einsum_computes_in_the_dtypes_of_its_products_and_sums(half):
    cases = [(equation, operands(equation)) for equation in EQUATIONS]
    with torch.autocast("cpu", half):
        theirs = [torch.einsum(equation, *inputs).dtype for equation, inputs in cases]
    plain = [torch.einsum(equation, *inputs) for equation, inputs in cases]
    assert {half, torch.float32} == set(theirs)
    start(half, verbosity=0)
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


def test_einsum_by_numbers_of_labels(half):
    x, y = r(4, 4), r(4, 4)
    start(half, verbosity=0)
    assert torch.einsum(x, [0, 1], y, [1, 2], [2, 0]).dtype is half
    assert torch.einsum(x, [..., 0], y, [..., 0], [..., 0]).dtype is torch.float32
    assert torch.einsum(x, [0, 0]).dtype is torch.float32


def test_a_sum_of_half_numbers_does_not_overflow(half):
    threes = torch.full((2, 100_000), 3.0, dtype=half)
    start(half, verbosity=0)
    assert torch.einsum("bn->b", threes).tolist() == [300_000.0] * 2
