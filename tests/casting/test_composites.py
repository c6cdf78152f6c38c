"""Functions that torch writes in Python or composes in C++: the products inside must be met.

Dtypes against autocast for CUDA, values and gradients against plain FP32.
"""

from __future__ import annotations

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
    "einsum": (lambda a, b: torch.einsum("ij,jk", a, b), square(), square()),
    "einsum batch": (lambda a, b: torch.einsum("bcij,bcjk->bik", a, b), square(2, 3), square(2, 3)),
    "einsum dots": (lambda a, b: torch.einsum("...ij,...jk", a, b), square(2), square(2)),
    "einsum three": (lambda a, b, c: torch.einsum("i,ij,j->", a, b, c), r(4), square(), r(4)),
    "einsum list": (lambda pair: torch.einsum("ij,kj", pair), [square(), square()]),
    "einsum numbers": (lambda a, b: torch.einsum(a, [0, 1], b, [1, 2], [2, 0]), square(), square()),
    "einsum diagonal": (lambda a: torch.einsum("ii->i", a), square()),
    "einsum outer": (lambda a, b: torch.einsum("i,j->ij", a, b), r(4), r(3)),
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
