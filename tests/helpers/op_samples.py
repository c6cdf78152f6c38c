"""Arguments for every function in the tables, by name: float32 tensors, small and tame.

Values lie in (0.1, 0.9), where logarithms, arc functions and powers are
defined and half precision is good to two digits.
"""

from collections.abc import Callable
from typing import Any

import torch

from ampatch.casting.places import resolve

Sample = tuple[tuple, dict]

NO_CPU_KERNEL = {
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "_scaled_dot_product_flash_attention",
}
"""Functions that no CPU build runs."""

NO_ORACLE = NO_CPU_KERNEL - {"_scaled_dot_product_flash_attention"} | {
    "gru",
    "gru_cell",
    "cov",
    "corrcoef",
    "grid_sampler",
}
"""Functions whose CUDA version a CPU build cannot imitate; they must follow the rule's word."""


def call(where: str, name: str, args: tuple, kwargs: dict) -> Any:
    return getattr(resolve(where), name)(*args, **kwargs)


def r(*shape: int) -> torch.Tensor:
    """Random values in (0.1, 0.9)."""
    return torch.rand(shape) * 0.8 + 0.1


def ints(top: int, *shape: int) -> torch.Tensor:
    """Random class numbers below `top`."""
    return torch.randint(top, shape)


def signs(*shape: int) -> torch.Tensor:
    return torch.randint(2, shape) * 2 - 1


def _recurrent_weights(gates: int) -> list:
    return [r(4 * gates, 3) - 0.5, r(4 * gates, 4) - 0.5, r(4 * gates) - 0.5, r(4 * gates) - 0.5]


def _recurrent(gates: int) -> Sample:
    state = (r(1, 2, 4), r(1, 2, 4)) if gates == 4 else r(1, 2, 4)
    weights = _recurrent_weights(gates)
    return (r(5, 2, 3), state, weights, True, 1, 0.0, False, False, False), {}


def _cell(gates: int) -> Sample:
    state = (r(2, 4), r(2, 4)) if gates == 4 else r(2, 4)
    return (r(2, 3), state, *_recurrent_weights(gates)), {}


def _call(*make: Any, **kwargs: Any) -> Callable[[], Sample]:
    """Shapes become tensors; everything else in a one-element list is passed as it is."""

    def build() -> Sample:
        args = tuple(
            r(*part) if isinstance(part, tuple) else part() if callable(part) else part[0]
            for part in make
        )
        return args, dict(kwargs)

    return build


def _calls(names: str, *make: Any) -> dict[str, Callable[[], Sample]]:
    return dict.fromkeys(names.split(), _call(*make))


_UNARY = (
    "cosh exp sinh log log10 log2 expm1 log1p acos arccos arcsin asin erfinv tan reciprocal rsqrt"
    " square norm nuclear_norm prod sum trapz trapezoid cumulative_trapezoid pdist"
    " softplus vector_norm matrix_norm cov corrcoef"
)
_BINARY = (
    "mm matmul __matmul__ dsmm spmm arctan2 atan2 dist inner vecdot cosine_similarity"
    " pairwise_distance mse_loss l1_loss smooth_l1_loss huber_loss kl_div"
    " binary_cross_entropy_with_logits binary_cross_entropy"
)
_IMAGE_UPSAMPLING = (
    "upsample_bilinear2d _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa"
)
_PLAIN = ([[1]], [[0]], [[1]], [False], [[0]], [1])
"""Stride, padding, dilation, whether transposed, output padding, groups."""
_CUDNN = ([[1, 1]], [[1, 1]], [1], [False], [False], [True])
"""Stride, dilation, groups, three switches."""

SAMPLES: dict[str, Callable[[], Sample]] = {
    **_calls(_UNARY, (3, 4)),
    **_calls("cumprod cumsum softmax log_softmax logsumexp", (3, 4), [1]),
    **_calls(_BINARY, (3, 3), (3, 3)),
    **_calls("addmm addcdiv addcmul triplet_margin_loss", (3, 3), (3, 3), (3, 3)),
    **_calls("pow __pow__", (3, 4), [2.0]),
    "frobenius_norm": _call((3, 4), [[0, 1]]),
    "norm_except_dim": _call((3, 4), [2], [0]),
    "torch._VF.norm": _call((3, 4), [2], [[1]], keepdim=True),
    "bmm": _call((2, 3, 4), (2, 4, 3)),
    "addbmm": _call((3, 3), (2, 3, 4), (2, 4, 3)),
    "baddbmm": _call((2, 3, 3), (2, 3, 4), (2, 4, 3)),
    "addmv": _call((3,), (3, 4), (4,)),
    "addr": _call((3, 4), (3,), (4,)),
    "cross": _call((3, 3), (3, 3), dim=1),
    "mv": _call((3, 4), (4,)),
    **_calls("dot vdot", (4,), (4,)),
    "conv1d": _call((2, 3, 6), (4, 3, 3), (4,)),
    "conv2d": _call((2, 3, 6, 6), (4, 3, 3, 3), (4,)),
    "conv3d": _call((2, 3, 4, 4, 4), (4, 3, 3, 3, 3), (4,)),
    "conv_tbc": _call((6, 2, 3), (3, 3, 4), (4,)),
    "conv_transpose1d": _call((2, 3, 6), (3, 4, 3), (4,)),
    "conv_transpose2d": _call((2, 3, 6, 6), (3, 4, 3, 3), (4,)),
    "conv_transpose3d": _call((2, 3, 4, 4, 4), (3, 4, 3, 3, 3), (4,)),
    "convolution": _call((2, 3, 6), (4, 3, 3), (4,), *_PLAIN),
    "_convolution": _call((2, 3, 6), (4, 3, 3), (4,), *_PLAIN, *[[False]] * 4),
    "cudnn_convolution": _call((2, 3, 6, 6), (4, 3, 3, 3), [[0, 0]], *_CUDNN),
    "cudnn_convolution_transpose": _call((2, 3, 6, 6), (3, 4, 3, 3), [[0, 0]], [[0, 0]], *_CUDNN),
    "linear": _call((2, 3), (4, 3), (4,)),
    "bilinear": _call((2, 3), (2, 4), (5, 3, 4), (5,)),
    "prelu": _call((2, 3), (3,)),
    "scaled_dot_product_attention": _call((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)),
    "_scaled_dot_product_flash_attention": _call((1, 2, 8, 8), (1, 2, 8, 8), (1, 2, 8, 8)),
    "matrix_power": _call((3, 3), [3]),
    "matrix_sqrth": lambda: ((torch.eye(3) + 0.1 * r(3, 3),), {}),
    "chain_matmul": lambda: (([r(2, 3), r(3, 4), r(4, 2)],), {}),
    "multi_dot": lambda: (([r(2, 3), r(3, 4), r(4, 2)],), {}),
    "einsum": lambda: (("ij,jk->ik", [r(2, 3), r(3, 4)]), {}),
    "tensordot": _call((2, 3), (3, 4), [[1]], [[0]]),
    "cdist": _call((2, 3), (4, 3), [2.0], [None]),
    "lstm": lambda: _recurrent(4),
    "lstm_cell": lambda: _cell(4),
    "gru": lambda: _recurrent(3),
    "gru_cell": lambda: _cell(3),
    **dict.fromkeys(("rnn_tanh", "rnn_relu"), lambda: _recurrent(1)),
    **dict.fromkeys(("rnn_tanh_cell", "rnn_relu_cell"), lambda: _cell(1)),
    "renorm": _call((3, 4), [2.0], [0], [1.0]),
    "sum_to_size": _call((3, 4), [(1, 4)]),
    "group_norm": _call((2, 4, 3), [2], (4,), (4,)),
    "layer_norm": _call((2, 4), [[4]], (4,), (4,)),
    "native_layer_norm": _call((2, 4), [[4]], (4,), (4,), [1e-5]),
    "rms_norm": _call((2, 4), [[4]], (4,)),
    "cosine_embedding_loss": _call((3, 4), (3, 4), lambda: signs(3)),
    "hinge_embedding_loss": _call((3, 4), lambda: signs(3, 4)),
    "margin_ranking_loss": _call((3,), (3,), lambda: signs(3)),
    "soft_margin_loss": _call((3, 4), lambda: signs(3, 4).float()),
    "poisson_nll_loss": _call((3, 4), (3, 4), [True], [False], [1e-8], [1]),
    "multilabel_margin_loss": _call((3, 4), lambda: ints(4, 3, 4)),
    **_calls(
        "multi_margin_loss cross_entropy_loss nll_loss nll_loss_nd", (3, 4), lambda: ints(4, 3)
    ),
    "nll_loss2d": _call((3, 4, 2, 2), lambda: ints(4, 3, 2, 2)),
    **_calls("upsample_nearest1d _upsample_nearest_exact1d", (1, 2, 4), [[8]]),
    **_calls("upsample_nearest2d _upsample_nearest_exact2d", (1, 2, 4, 4), [[8] * 2]),
    **_calls("upsample_nearest3d _upsample_nearest_exact3d", (1, 2, 4, 4, 4), [[8] * 3]),
    "upsample_linear1d": _call((1, 2, 4), [[8]], [False]),
    **_calls(_IMAGE_UPSAMPLING, (1, 2, 4, 4), [[8] * 2], [False]),
    "upsample_trilinear3d": _call((1, 2, 4, 4, 4), [[8] * 3], [False]),
    "grid_sampler": _call((1, 2, 4, 4), (1, 3, 3, 2), [0], [0], [False]),
    "index_put": lambda: ((r(4), (torch.tensor([0, 2]),), r(2)), {}),
    "scatter_add": lambda: ((r(3, 4), 0, ints(3, 2, 4), r(2, 4)), {}),
}


def sample(where: str, name: str) -> Sample:
    torch.manual_seed(0)
    return SAMPLES.get(f"{where}.{name}", SAMPLES.get(name))()
