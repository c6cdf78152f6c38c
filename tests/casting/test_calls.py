"""How a call is made: `dtype=`, containers, two half dtypes, banned functions, exponents."""

from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F

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
