"""Every listed function, called as its row says, against PyTorch's own autocast for CUDA.

The oracle needs no GPU: inside a FakeTensorMode tensors may claim to be on
CUDA, and the dispatcher applies the real autocast policy to them.
"""

from __future__ import annotations

import warnings
from collections import namedtuple
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_samples import sample
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

import ampatch
from ampatch.casting.install import has, resolve
from ampatch.casting.tables import BLACKLIST, PROMOTE, WHITELIST, Rule

PLACES = [
    (row.where, name, row.rule)
    for row in (*WHITELIST, *BLACKLIST, *PROMOTE)
    for name in row.names
    if not row.native and has(row.where, name)
]
PLACE_IDS = [f"{where}.{name}" for where, name, _ in PLACES]
NO_CPU_KERNEL = {
    "cudnn_convolution", "cudnn_convolution_transpose", "_scaled_dot_product_flash_attention",
}
FLOATS = (Rule.FLOAT, Rule.FLOAT_UNLESS_DTYPE)


@pytest.fixture
def o1(half):
    """Casting in force for the whole process."""
    ampatch.initialize([], opt_level="O1", dtype=half, verbosity=0)


def call(where: str, name: str, args: tuple, kwargs: dict) -> Any:
    return getattr(resolve(where), name)(*args, **kwargs)


def to(dtype: torch.dtype, tree: Any) -> Any:
    return tree_map(
        lambda leaf: (
            leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
        ),
        tree,
    )


def dtypes(tree: Any) -> list:
    return [leaf.dtype for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def cuda_autocast(dtype: torch.dtype):
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
        torch.clear_autocast_cache()


def on_fake_cuda(tree: Any) -> Any:
    return tree_map(
        lambda leaf: (
            torch.empty(leaf.shape, dtype=leaf.dtype, device="cuda")
            if isinstance(leaf, Tensor) else leaf
        ),
        tree,
    )


def expected_dtypes(where: str, name: str, rule: Rule, given: torch.dtype, half) -> list | None:
    """What autocast for CUDA returns; None where its oracle has no answer without a GPU."""
    args, kwargs = to(given, sample(where, name))
    if rule is Rule.PROMOTE and given not in (torch.float32, half):
        return None  # autocast refuses the other half type
    return autocasts_answer(half, lambda: call(where, name, *on_fake_cuda((args, kwargs))))


def autocasts_answer(half: torch.dtype, ask: Callable[[], Any]) -> list | None:
    """The dtypes of `ask()` under autocast for fake CUDA; None where it needs a real driver."""
    try:
        with FakeTensorMode(), cuda_autocast(half):
            return dtypes(ask())
    except RuntimeError as error:
        if DRIVERLESS and "driver" in str(error):
            return None
        raise


NO_ORACLE = NO_CPU_KERNEL - {"_scaled_dot_product_flash_attention"} | {
    "gru", "gru_cell", "cov", "corrcoef", "grid_sampler",
}
"""Functions whose CUDA version a CPU build cannot imitate; they must follow the rule's word."""

DRIVERLESS = bool(torch.version.cuda) and not torch.cuda.is_available()
"""In such builds some functions (convolutions, lstm) ask the driver even for fake tensors."""


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
    ampatch.initialize([], opt_level="O1", dtype=half, verbosity=0)
    for given in GIVEN:
        args, kwargs = to(given, sample(where, name))
        if name in NO_CPU_KERNEL:
            with FakeTensorMode():
                found = dtypes(call(where, name, *on_fake_cuda((args, kwargs))))
        else:
            found = dtypes(call(where, name, args, kwargs))
        word = half if rule is Rule.HALF else given
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
    exact = rule in FLOATS or rule is Rule.PROMOTE
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
    ampatch.initialize([], opt_level="O1", dtype=torch.bfloat16, verbosity=0)
    for arguments, plain in zip(calls, plains, strict=True):
        patched = outcome(*arguments)
        if isinstance(plain, str):
            assert patched == plain
            continue
        for new, old in zip(patched, plain, strict=True):
            assert new.dtype is old.dtype
            torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


# What the tables cannot say


@pytest.mark.parametrize("function", [torch.mm, torch.exp, torch.sum, torch.dot])
def test_out_is_written_and_not_cast(function, half):
    name = function.__name__
    args = {"mm": 2, "exp": 1, "sum": 1, "dot": 2}[name] * [torch.full((3, 3), 0.1)]
    if name == "dot":
        args = [arg[0] for arg in args]
    reference = function(*args, **({"dim": 0} if name == "sum" else {}))
    out = torch.zeros_like(reference)
    ampatch.initialize([], opt_level="O1", dtype=half, verbosity=0)
    kwargs = {"dim": 0} if name == "sum" else {}
    assert getattr(torch, name)(*args, out=out, **kwargs) is out
    assert out.dtype is torch.float32 and torch.equal(out, reference)  # exact: nothing was cast


@pytest.mark.parametrize("call_it", [
    lambda x, dtype: torch.softmax(x, -1, dtype=dtype),
    lambda x, dtype: torch.softmax(x, -1, dtype),
    lambda x, dtype: F.softmax(x, -1, dtype=dtype),
    lambda x, dtype: x.log_softmax(-1, dtype),
    lambda x, dtype: x.sum(dtype=dtype),
    lambda x, dtype: torch.cumsum(x, 0, dtype=dtype),
    lambda x, dtype: torch.norm(x, dtype=dtype),
    lambda x, dtype: torch.norm(x, 2, 1, False, None, dtype),
    lambda x, dtype: torch.linalg.vector_norm(x, dtype=dtype),
])
def test_an_explicit_dtype_wins(call_it, half, o1):
    x = torch.rand(3, 4).to(half)
    assert call_it(x, half).dtype is half
    assert call_it(x, torch.float64).dtype is torch.float64
    assert call_it(x, None).dtype is torch.float32


Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize("container", [list, tuple, lambda items: Pair(*items)])
def test_containers_are_cast_inside_and_left_alone(container, half, o1):
    seen = []

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


def test_promote_is_to_the_widest(half, o1):
    wide, narrow = torch.rand(3), torch.rand(3).to(half)
    other = narrow.to(torch.bfloat16 if half is torch.float16 else torch.float16)
    assert torch.dot(narrow, wide).dtype is torch.float32
    assert torch.dot(narrow, narrow).dtype is half
    assert torch.dot(narrow, other).dtype is torch.float32
    assert torch.addcmul(narrow, narrow, torch.tensor(0.5)).dtype is torch.float32
    with pytest.raises(RuntimeError):
        torch.dot(narrow, wide.double())  # as PyTorch: float64 is no business of ours


def test_in_place_is_left_as_pytorch_has_it(half, o1):
    x = torch.rand(3).to(half)
    assert x.exp_() is x and x.dtype is half
    x **= 2
    assert x.dtype is half
    y = torch.zeros(3, 3)
    assert y.addmm_(torch.ones(3, 3), torch.ones(3, 3)) is y and y.dtype is torch.float32


def test_operators(half, o1):
    h, w = torch.rand(3, 3).to(half), torch.rand(3, 3)
    assert (h @ w).dtype is half and (w @ h).dtype is half and (w @ w).dtype is half
    assert (h**2).dtype is torch.float32 and (2**h).dtype is torch.float32
    with FakeTensorMode(), cuda_autocast(half):
        fake = torch.empty(3, 3, dtype=half, device="cuda")
        expected = (1 / fake).dtype
    assert (1 / h).dtype is expected


def test_bce_runs_in_fp32_with_one_warning(half, caplog):
    ampatch.initialize([], opt_level="O1", dtype=half)
    p, target = torch.full((4,), 0.9995).to(half), torch.ones(4).to(half)
    with caplog.at_level("WARNING", logger="ampatch"):
        found = [F.binary_cross_entropy(p, target) for _ in range(3)]
    assert all(value.dtype is torch.float32 for value in found)
    assert found[0] == F.binary_cross_entropy(p.float(), target.float())
    texts = [entry.getMessage() for entry in caplog.records]
    assert len(texts) == 1 and "binary_cross_entropy_with_logits" in texts[0]


def test_bce_can_be_refused(half):
    ampatch.initialize([], opt_level="O1", dtype=half, allow_banned=False, verbosity=0)
    p = torch.full((4,), 0.5)
    assert F.binary_cross_entropy(p, p).dtype is torch.float32
    with pytest.raises(NotImplementedError, match="BCEWithLogitsLoss"):
        F.binary_cross_entropy(p.to(half), p.to(half))


@pytest.mark.parametrize("n", [0, 1, 2, 5, -1, -3])
@pytest.mark.parametrize("where", ["torch", "torch.Tensor", "torch.linalg"])
def test_matrix_power(where, n, half, o1):
    matrix = torch.eye(3) + 0.1 * torch.rand(3, 3)
    with ampatch.disable_casts():
        reference = torch.linalg.matrix_power(matrix, n)
    found = call(where, "matrix_power", (matrix, n), {})
    torch.testing.assert_close(found.float(), reference, rtol=0.05, atol=0.05)
    assert found.dtype is (torch.float32 if n in (0, 1, -1) else half)
    assert call(where, "matrix_power", (matrix.to(half), n), {}).dtype is (
        torch.float32 if n == -1 else half
    )
    named = call(where, "matrix_power", (matrix,), {"n": n})
    assert named.dtype is found.dtype


IMAGE = torch.rand(1, 2, 6, 6)
ROWS = torch.rand(6, 6)
PYTHON_FUNCTIONS = {  # written in Python in torch: the leaf below must be met
    "interpolate": lambda t: F.interpolate(t(IMAGE), scale_factor=2, mode="bilinear"),
    "nearest": lambda t: F.interpolate(t(IMAGE), scale_factor=2),
    "bicubic aa": lambda t: F.interpolate(t(IMAGE), (3, 3), mode="bicubic", antialias=True),
    "attention": lambda t: F.scaled_dot_product_attention(t(IMAGE), t(IMAGE), t(IMAGE)),
    "cross entropy": lambda t: F.cross_entropy(t(ROWS), torch.arange(6)),
    "soft labels": lambda t: F.cross_entropy(t(ROWS), t(ROWS)),
    "nll": lambda t: F.nll_loss(t(ROWS), torch.arange(6)),
    "mse": lambda t: F.mse_loss(t(IMAGE), t(IMAGE) * 0.5),
    "l1": lambda t: F.l1_loss(t(IMAGE), t(IMAGE) * 0.5),
    "huber": lambda t: F.huber_loss(t(IMAGE), t(IMAGE) * 0.5),
    "smooth l1": lambda t: F.smooth_l1_loss(t(IMAGE), t(IMAGE) * 0.5),
    "kl": lambda t: F.kl_div(t(IMAGE), t(IMAGE) * 0.5, reduction="batchmean"),
    "bce logits": lambda t: F.binary_cross_entropy_with_logits(t(IMAGE), t(IMAGE)),
    "einsum": lambda t: torch.einsum("bcij,bcjk->bik", t(IMAGE), t(IMAGE)),
    "einsum list": lambda t: torch.einsum("ij,jk", [t(ROWS), t(ROWS)]),
    "multi_dot": lambda t: torch.linalg.multi_dot([t(ROWS), t(ROWS)]),
    "cdist": lambda t: torch.cdist(t(ROWS), t(ROWS)),
    "tensordot": lambda t: torch.tensordot(t(IMAGE), t(IMAGE), dims=2 * [[2, 3]]),
    "chain_matmul": lambda t: torch.chain_matmul(t(ROWS), t(ROWS)),
    "norm": lambda t: torch.norm(t(IMAGE)),
    "method norm": lambda t: t(IMAGE).norm(),
    "normalize": lambda t: F.normalize(t(IMAGE)),
    "layer norm": lambda t: F.layer_norm(t(IMAGE), (6, 6)),
    "group norm": lambda t: F.group_norm(t(IMAGE), 1),
    "gelu (no row)": lambda t: F.gelu(t(IMAGE)),
}


@pytest.mark.filterwarnings("ignore:.* is deprecated")
@pytest.mark.parametrize("given", ["float32", "half"])
@pytest.mark.parametrize("name", PYTHON_FUNCTIONS)
def test_python_functions_have_autocasts_dtypes(name, given, half):
    dtype = torch.float32 if given == "float32" else half

    def on_cuda(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=dtype, device="cuda")

    function = PYTHON_FUNCTIONS[name]
    if name in ("cross entropy", "nll"):
        expected = [torch.float32]  # its labels are not on CUDA
    elif half is torch.bfloat16 and name == "tensordot" and given == "float32":
        expected = [torch.float32]
    else:
        expected = autocasts_answer(half, lambda: function(on_cuda))
    if expected is None:
        pytest.skip("this build of torch asks the CUDA driver, and there is none")
    ampatch.initialize([], opt_level="O1", dtype=half, verbosity=0)
    assert dtypes(function(lambda tensor: tensor.to(dtype))) == expected


def test_grid_sample_takes_mixed_inputs(half, o1):
    grid = torch.rand(1, 3, 3, 2)
    with ampatch.disable_casts():
        reference = F.grid_sample(IMAGE.to(half).float(), grid, align_corners=False)
    assert torch.equal(F.grid_sample(IMAGE.to(half), grid, align_corners=False), reference)


UNLISTED = {
    "relu": lambda x: F.relu(x), "gelu": lambda x: F.gelu(x), "silu": lambda x: F.silu(x),
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "sqrt": lambda x: x.abs().sqrt(),
    "mean": lambda x: x.mean(), "var": lambda x: x.var(), "max": lambda x: x.amax(0),
    "add": lambda x: x + 1, "mul": lambda x: x * x, "div": lambda x: x / 3, "neg": lambda x: -x,
    "cat": lambda x: torch.cat([x, x]), "stack": lambda x: torch.stack([x, x]),
    "where": lambda x: torch.where(x > 0, x, -x), "clamp": lambda x: x.clamp(-1, 1),
    "max_pool": lambda x: F.max_pool1d(x[None], 2), "pad": lambda x: F.pad(x, (1, 1)),
    "avg_pool": lambda x: F.adaptive_avg_pool1d(x[None], 2), "dropout": lambda x: F.dropout(x, 0.0),
    "sort": lambda x: x.sort().values, "view": lambda x: x.reshape(-1).t(), "abs": torch.abs,
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "embedding": lambda x: F.embedding(torch.tensor([0, 2]), x), "index": lambda x: x[[0, 1]],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", UNLISTED)
def test_functions_in_no_table_are_bit_identical(name, dtype):
    x = (torch.rand(4, 6) - 0.5).to(dtype)
    plain = UNLISTED[name](x)
    ampatch.initialize([], opt_level="O1", dtype=torch.bfloat16, verbosity=0)
    found = UNLISTED[name](x)
    assert found.dtype is plain.dtype and torch.equal(found, plain)


def test_an_explicit_out_of_none_is_no_out():
    """Wrappers pass `out=None` on; the cast must not be lost to it."""
    ampatch.initialize(torch.nn.Linear(2, 2), verbosity=0)
    full = torch.ones(2, 2)
    assert torch.mm(full, full, out=None).dtype is torch.float16
    assert torch.linalg.matrix_power(full, 2, out=None).dtype is torch.float16
