"""Functions that torch writes in Python or composes in C++: the products inside must be met.

Dtypes against autocast for CUDA, values and gradients against plain FP32.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from autocast_oracle import check_like_autocast
from op_samples import ints, r

import ampatch


def square(*batch: int) -> torch.Tensor:
    return r(*batch, 4, 4)


IMAGE, PICTURES = (1, 2, 6, 6), (2, 3, 4, 5)
COMPOSITES = {  # name: function, arguments
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=2), r(3, 4, 4), r(4, 4, 2)),
    "tensordot dims": (lambda a, b: torch.tensordot(a, b, dims=([1], [0])), square(), square()),
    "inner": (lambda a, b: torch.inner(a, b), square(), square()),
    "inner method": (lambda a, b: a.inner(b), r(4), r(4)),
    "outer": (lambda a, b: torch.outer(a, b), r(4), r(3)),
    "ger": (lambda a, b: a.ger(b), r(4), r(3)),
    "kron": (lambda a, b: torch.kron(a, b), square(), square()),
    "multi_dot": (lambda all: torch.linalg.multi_dot(all), [square(), square(), square()]),
    "chain_matmul": (lambda a, b: torch.chain_matmul(a, b), square(), square()),
    "cartesian": (lambda a, b: torch.cartesian_prod(a, b), r(4), r(3)),
    "cdist": (lambda a, b: torch.cdist(a, b), r(4, 3), r(5, 3) + 1),
    "cdist p=1": (lambda a, b: torch.cdist(a, b, 1.0), r(4, 3), r(5, 3) + 1),
    "cdist by product": (
        lambda a, b: torch.cdist(a, b, compute_mode="use_mm_for_euclid_dist"),
        r(4, 3),
        r(5, 3) + 1,
    ),
    "bilinear": (lambda *args: F.bilinear(*args), r(5, 3), r(5, 4), r(2, 3, 4), r(2)),
    "bilinear no bias": (lambda *args: torch.bilinear(*args, None), r(5, 3), r(5, 4), r(2, 3, 4)),
    "matrix @ vector": (lambda a, b: a @ b, square(), r(4)),
    "vector @ vector": (lambda a, b: a @ b, r(4), r(4)),
    "batch @ matrix": (lambda a, b: a @ b, square(3), square()),
    "rmatmul": (lambda a, b: a.__rmatmul__(b), square(), square()),
    "mT @": (lambda a, b: a.mT @ b, square(), square()),
    "** number": (lambda a: a**3, square()),
    "** tensor": (lambda a, b: a**b, square(), square()),
    "number **": (lambda a: 2**a, square()),
    "rpow": (lambda a: a.__rpow__(3.0), square()),
    "float_power": (lambda a: torch.float_power(a, 2).float(), square()),
    "1 /": (lambda a: 1 / a, square()),
    "rsub": (lambda a: 1 - a, square()),
    "%": (lambda a, b: a % b, square(), square()),
    "lstm_cell": (
        lambda *args: torch.lstm_cell(args[0], args[1:3], *args[3:]),
        r(2, 3),
        r(2, 4),
        r(2, 4),
        r(16, 3),
        r(16, 4),
        r(16),
        r(16),
    ),
    "addmm": (lambda *args: torch.addmm(*args, beta=0.5, alpha=2), square(), square(), square()),
    "baddbmm": (lambda a, b, c: a.baddbmm(b, c), square(2), square(2), square(2)),
    "bilinear resize": (lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"), r(*IMAGE)),
    "nearest resize": (lambda a: F.interpolate(a, scale_factor=2), r(*IMAGE)),
    "nearest-exact": (lambda a: F.interpolate(a, 5, mode="nearest-exact"), r(1, 2, 4)),
    "linear resize": (lambda a: F.interpolate(a, 5, mode="linear"), r(1, 2, 4)),
    "trilinear": (lambda a: F.interpolate(a, 5, mode="trilinear"), r(1, 2, 3, 3, 3)),
    "area": (lambda a: F.interpolate(a, 3, mode="area"), r(*IMAGE)),
    "bicubic": (lambda a: F.interpolate(a, 3, mode="bicubic"), r(*IMAGE)),
    "bicubic aa": (lambda a: F.interpolate(a, 3, mode="bicubic", antialias=True), r(*IMAGE)),
    "bilinear aa": (lambda a: F.interpolate(a, 3, mode="bilinear", antialias=True), r(*IMAGE)),
    "upsampling layer": (lambda a: torch.nn.Upsample(scale_factor=2)(a), r(*IMAGE)),
    "pixel shuffle": (lambda a: F.pixel_shuffle(a, 2), r(1, 4, 2, 2)),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), *[r(*PICTURES)] * 3),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        *[r(*PICTURES)] * 3,
    ),
    "masked attention": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        *[r(*PICTURES)] * 3,
        torch.tensor([[True, False, True, True]]),
    ),
    "attention, float mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        *[r(*PICTURES)] * 3,
        r(4, 4),
    ),
    "norm": (lambda a: torch.norm(a), square()),
    "norm fro": (lambda a: torch.norm(a, "fro", dim=1), square()),
    "method norm": (lambda a: a.norm(3, dim=0), square()),
    "normalize": (lambda a: F.normalize(a), square()),
    "cosine": (lambda a, b: F.cosine_similarity(a, b), square(), square()),
    "distance": (lambda a, b: F.pairwise_distance(a, b), r(4, 3), r(4, 3) + 1),
    "pdist": (lambda a: F.pdist(a), torch.arange(8.0).reshape(4, 2)),
    "layer norm": (lambda a, w, b: F.layer_norm(a, (4,), w, b), square(), r(4), r(4)),
    "rms norm": (lambda a, w: F.rms_norm(a, (4,), w), square(), r(4)),
    "group norm": (lambda a: F.group_norm(a, 2), r(2, 4, 3)),
    "instance norm": (lambda a: F.instance_norm(a), r(2, 4, 9)),
    "batch norm": (lambda a: F.batch_norm(a, None, None, training=True), r(9, 4)),
    "local response norm": (lambda a: F.local_response_norm(a, 2), r(2, 4, 3)),
    "softmin": (lambda a: F.softmin(a, -1), square()),
    "gumbel softmax": (lambda a: F.gumbel_softmax(a, dim=-1).sum(-1), square()),
    "logsigmoid": (lambda a: F.logsigmoid(a), square()),
    "gelu": (lambda a: F.gelu(a), square()),
    "embedding": (lambda i, w: F.embedding(i, w), ints(4, 5), square()),
    "embedding bag": (lambda i, w: F.embedding_bag(i, w, mode="sum"), ints(4, 3, 2), square()),
    "fold": (lambda a: F.fold(a, (4, 4), 2), r(1, 8, 9)),
    "convolution, same": (lambda a, w: F.conv2d(a, w, padding="same"), r(*IMAGE), r(3, 2, 3, 3)),
    "transposed": (lambda a, w: F.conv_transpose1d(a, w), r(1, 2, 6), r(2, 3, 3)),
    "cumulative sum": (lambda a: a.cumsum(0), square()),
    "sum over": (lambda a: a.sum((0, 1), keepdim=True), square()),
    "log_softmax": (lambda a: F.log_softmax(a, dim=-1), square()),
}


EQUATIONS = [
    *(
        "ij,jk",
        "ij,kj->ki",
        "bcij,bcjk->bik",
        "...ij,...jk",
        "...ij,...ij->...",
        "ij,ij->",
        "ii,i->",
    ),
    *("i,ij,j->", "ij,jk,kl->il", "bi,bj,ij->b"),  # every operand is contracted
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
    """Autocast for the CPU takes an equation apart; the one for CUDA has no FP32 in any."""
    cases = [(equation, operands(equation)) for equation in EQUATIONS]
    with torch.autocast("cpu", half):
        theirs = [torch.einsum(equation, *given).dtype for equation, given in cases]
    plain = [torch.einsum(equation, *given) for equation, given in cases]
    assert {half, torch.float32} == set(theirs)
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    for (equation, given), dtype, expected in zip(cases, theirs, plain, strict=True):
        numbers = [given, [x.to(half) for x in given]]
        for args in numbers:
            found = torch.einsum(equation, *args)
            torch.testing.assert_close(found.float(), expected, rtol=0.03, atol=0.03)
        wide = torch.einsum(equation, *given)
        assert wide.dtype is dtype, equation
        if dtype is torch.float32:
            assert torch.equal(wide, expected), equation
        found = torch.einsum(equation, [given[0].to(half), *given[1:]])
        assert found.dtype is (
            torch.float32 if len(given) > 1 and dtype is not half else found.dtype
        )


def test_einsum_by_numbers_of_labels(half):
    x, y = square(), square()
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    assert torch.einsum(x, [0, 1], y, [1, 2], [2, 0]).dtype is half
    assert torch.einsum(x, [..., 0], y, [..., 0], [..., 0]).dtype is torch.float32
    assert torch.einsum(x, [0, 0]).dtype is torch.float32


class Rotary(torch.nn.Module):
    """Positions times frequencies by einsum, as rotary embeddings have them."""

    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation = equation
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0.0, 32, 2) / 32))

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        angles = torch.einsum(self.equation, t, self.inv_freq)
        return torch.cat((angles, angles), dim=-1).cos() * self.scale


@pytest.mark.parametrize("equation", ["i , j -> i j", "b i , j -> b i j"])
def test_rotary_embeddings_keep_their_positions(equation, half):
    t = torch.arange(1000.0, 1016.0)
    t = t if equation.startswith("i") else t[None]
    plain = Rotary(equation)(t)
    model = ampatch.initialize(Rotary(equation), opt_level="O1", dtype=half, verbosity=0)
    assert torch.equal(model(t), plain)


@pytest.mark.parametrize("given", ["float32", "half"])
def test_a_sum_by_einsum_does_not_overflow(given, half):
    threes = torch.full((2, 100_000), 3.0, dtype=torch.float32 if given == "float32" else half)
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    assert torch.einsum("bn->b", threes).tolist() == [300_000.0] * 2


@pytest.mark.filterwarnings("ignore:.* is deprecated", "ignore:.*chain_matmul")
def test_composites_are_autocasts(half):
    torch.manual_seed(0)
    cases = {name: (function, tuple(args)) for name, (function, *args) in COMPOSITES.items()}
    check_like_autocast(cases, half)


@pytest.mark.parametrize("dtype", ["float32", "half"])
def test_weights_of_a_bag_keep_their_dtype(dtype, half):
    """Of one dtype as plain PyTorch, which refuses two, and so under autocast; the widest wins."""
    dtype = torch.float32 if dtype == "float32" else half
    rows, table, weights = ints(4, 3, 2), square().to(dtype), r(3, 2)
    plain = F.embedding_bag(rows, table, mode="sum", per_sample_weights=weights.to(dtype))
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    found = F.embedding_bag(rows, table, mode="sum", per_sample_weights=weights.to(dtype))
    assert found.dtype is dtype and torch.equal(found, plain)
    mixed = F.embedding_bag(rows, table, mode="sum", per_sample_weights=weights)
    ampatch.deactivate()
    wide = F.embedding_bag(rows, table.float(), mode="sum", per_sample_weights=weights)
    assert mixed.dtype is torch.float32 and torch.equal(mixed, wide)
