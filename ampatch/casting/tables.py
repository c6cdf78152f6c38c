"""Which function follows which rule.  Data only: no torch import, no logic.

A row reads "these names, in this namespace, follow this rule, because ...".  `why` is shown to
users, in errors and by `ampatch tables`, so write it for them.  The order of rows does not matter,
and within the first five tables no (where, name) appears twice; a test checks this.

`where` is the place of the patch, not of the documentation: if a function of `torch.nn.functional`
is written in Python, the row names the builtin that it calls (`torch._C._nn`, `torch._VF`,
`torch`).  Calls with `out=` and in-place functions follow no rule: PyTorch decides their dtypes.
In-place functions that write other tensors into their first argument have rows, because PyTorch
refuses values of another dtype.

The numbers in the reasons are for FP16.  Bfloat16 has the range of FP32 but only eight significant
bits, and gets the same rules.

The first two tables have the names that apex gave them: whitelist and blacklist.
"""

from enum import Enum
from typing import NamedTuple


class Rule(Enum):
    """The dtype that the floating inputs of a call get."""

    HALF = "half"  # the half dtype
    CONTRACTION = "half if contracted"  # HALF if operands are multiplied and summed at once
    FLOAT = "float"  # half inputs are cast to FP32
    FLOAT_ON_CPU = "float on the CPU"  # FP32 on the CPU, PROMOTE on other devices
    FLOAT_ON_CPU_UNLESS_SPARSE = "float on the CPU unless sparse"  # for embeddings
    FLOAT_ON_CPU_IF_VECTOR = "float on the CPU if a vector"  # the first input has one dimension
    FLOAT_ON_CPU_IF_ADDING = "float on the CPU if adding"  # accumulate=True, mode="replicate"
    FLOAT_ON_CPU_IF_HALF_WEIGHT = "float on the CPU if the weight is half"  # and statistics are not
    FLOAT_ON_CPU_IF_OVERLAPPING = "float on the CPU if overlapping"  # overlapping pooling windows
    FLOAT_UNLESS_DTYPE = "float unless dtype="  # FLOAT, unless the call has a dtype= of its own
    PROMOTE = "promote"  # the widest floating dtype among the inputs
    LIKE_FIRST = "like first"  # the call writes into its first input
    POWER = "matrix power"  # HALF for exponents from 2 on, FP32 for negative ones
    BANNED = "banned"  # refuse half inputs or run in FP32, and say what to use instead
    REFUSE_IN_PLACE = "refused in place"  # raise on a half tensor; with apex's tables only


class Row(NamedTuple):
    """The functions `names` of the namespace `where` follow `rule`, for the reason `why`.

    A `done_by_torch` row is there for the reader: PyTorch itself follows the rule, and nothing is
    installed.  `only_gradient`: only the gradient is wrong in half, so that calls that need no
    gradient stay in half.
    """

    where: str
    names: tuple[str, ...]
    rule: Rule
    why: str
    done_by_torch: bool = False
    only_gradient: bool = False


BUILTINS = {"torch.nn.functional": "torch._C._nn", "torch": "torch._VF"}
"""The namespace of the builtins that a public namespace calls, for rows."""

# Reasons that several namespaces share.

_MATRIX = "Matrix products run on tensor cores, many times faster in half."
_VECTOR = "Reading the matrix takes most of the time, and FP16 has half the bytes of FP32."
_CONVOLUTION = "Convolutions run as matrix products on tensor cores, many times faster in half."
_RECURRENT = "Recurrent layers are chains of matrix products, which tensor cores run in half."
_ATTENTION = "Flash kernels on GPUs accept half only, and compute the softmax in FP32 internally."
_INSIDE = "PyTorch multiplies inside C++, so the inputs have to be half before the call."
_CONTRACTION = (
    "It is a matrix product where each operand shares a summed label with another; other sums run"
    " in FP32, and elementwise products (rotary embeddings) in the widest dtype."
)
_PRELU = "Input and slope need the same dtype, and the input is usually a half convolution output."
_POWER = (
    "A power is a chain of matrix products and runs in half; a negative exponent needs an inverse,"
    " in FP32, and exponents 0 and 1 need no product."
)

_EXPONENTIAL = "It grows exponentially: inputs of 11 to 12 reach 65504, the largest FP16 number."
_LOGARITHM = "FP16 rounds inputs below 3e-8 to zero, whose logarithm is minus infinity."
_NEAR_ZERO = "It is made for inputs near zero, where FP16 loses digits (below 6e-5)."
_STEEP = "Its slope is unbounded, so it magnifies the rounding error of a half input."
_INVERSE = "It magnifies the rounding error of small inputs, and 1/x overflows below 1.5e-5."
_SQUARE = "Squares overflow FP16 from 256 on and become zero below 1.7e-4."
_NORM = "It sums squares or other powers, and a square overflows FP16 from 256 on."
_EIGEN = "It needs eigenvalues, which PyTorch does not compute in half."
_SINGULAR = "It needs singular values, which PyTorch does not compute in half."
_NORMALIZE = "It averages squares, which overflow FP16 from 256 on."
_SOFTMAX = "It sums exponentials; FP16 rounds the small ones to zero, and the loss sees zeros."
_COVARIANCE = "It sums products of small differences from the mean, which half rounds away."
_TOTAL = "Sums of many values overflow FP16, or need more digits than it has."
_LOSS = "All gradients start at the loss, and FP32 costs almost nothing here."
_LOG_LOSS = "It uses exponentials or logarithms of probabilities, and FP16 loses the small ones."
_RESIZE = "Its backward pass sums many output gradients into one pixel, which half rounds."

_ZERO_DIM = "PyTorch promotes these inputs itself, except for 0-dim tensors."
_ONE_DTYPE = "PyTorch refuses mixed dtypes here, so all inputs get the widest one."
_OUT_OF_BOUNDS = (
    "On the CPU the half kernel counts pixels in 16 bits: beyond 32,767 it reads and writes out of"
    " bounds; elsewhere PyTorch refuses mixed dtypes."
)
_WRITES = "It writes one tensor into another, and PyTorch refuses mixed dtypes here."
_INTO = (
    "It writes into its first input, whose dtype cannot change, and PyTorch refuses values of"
    " another dtype."
)
_FOURIER = "Its sums overflow FP16; PyTorch has it in half on GPUs only, for powers of 2."
_DECOMPOSITION = "PyTorch has no half kernel for it, and it needs the precision."
_NO_HALF = "PyTorch has no half kernel for it."
_NO_HALF_ON_CPU = "PyTorch has a half kernel for it on GPUs only."
_COUNTS = "It counts in the dtype of its input: FP16 up to 2,048, bfloat16 up to 256."
_NO_COMPLEX = (
    "PyTorch has no complex bfloat16 dtype, and few functions for complex FP16; the result of a"
    " half input is a copy, not a view."
)
_SERIES = "It sums powers of a matrix, which soon overflow FP16."
_READ_OFTEN = (
    "On the CPU PyTorch sums in half the gradients of an element that is read several times."
)
_ADDED_INTO = "On the CPU PyTorch sums in half the values that go to the same element."
_MATRICES = "On the CPU PyTorch sums the products of the batch in half, one by one."
_OUTPUTS = "On the CPU PyTorch sums the gradients of all outputs in half, one by one."
_WINDOWS = "On the CPU PyTorch sums windows, and elements of several windows, in half."
_OF_WINDOWS = "On the CPU PyTorch sums in half the gradients of all windows over an element."
_ENTRIES = "On the CPU PyTorch sums the entries of sparse tensors in half, one by one."
_DONE_BY_TORCH = "PyTorch promotes mixed inputs itself, so there is nothing to patch."

# ruff would put each name on a line of its own.
# fmt: off

# Names that two namespaces share.

_CONVOLUTIONS = (
    "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
)
_RECURRENTS = (
    "gru", "gru_cell", "lstm", "lstm_cell",
    "rnn_relu", "rnn_relu_cell", "rnn_tanh", "rnn_tanh_cell",
)
_WRITERS = (
    "index_add", "index_copy", "index_reduce", "lerp", "masked_scatter", "put", "scatter",
    "scatter_reduce",
)
_WRITERS_IN_PLACE = (
    "__setitem__", "index_add_", "index_copy_", "index_put_", "index_reduce_", "lerp_",
    "masked_scatter_", "put_", "scatter_", "scatter_add_", "scatter_reduce_",
)
_TRANSFORMS = (
    "fft", "fft2", "fftn", "hfft", "hfft2", "hfftn", "ifft", "ifft2", "ifftn", "ihfft", "ihfft2",
    "ihfftn", "irfft", "irfft2", "irfftn", "rfft", "rfft2", "rfftn",
)
_DECOMPOSITIONS = (
    "cholesky", "cholesky_inverse", "cholesky_solve", "det", "geqrf", "inverse", "logdet",
    "lu_solve", "orgqr", "ormqr", "pinverse", "qr", "slogdet", "svd", "triangular_solve",
)
_LINALG = (
    "cholesky", "cholesky_ex", "cond", "det", "eig", "eigh", "eigvals", "eigvalsh",
    "householder_product", "inv", "inv_ex", "ldl_factor", "ldl_factor_ex", "ldl_solve", "lstsq",
    "lu", "lu_factor", "lu_factor_ex", "lu_solve", "matrix_rank", "pinv", "polar", "qr", "slogdet",
    "solve", "solve_ex", "solve_triangular", "svd", "svdvals", "tensorinv", "tensorsolve",
)
_SPECIAL = (
    "airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "chebyshev_polynomial_t",
    "chebyshev_polynomial_u", "chebyshev_polynomial_v", "chebyshev_polynomial_w", "erfcx",
    "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l",
    "legendre_polynomial_p", "log_ndtr", "modified_bessel_i0", "modified_bessel_i1",
    "modified_bessel_k0", "modified_bessel_k1", "ndtri", "scaled_modified_bessel_k0",
    "scaled_modified_bessel_k1", "shifted_chebyshev_polynomial_t",
    "shifted_chebyshev_polynomial_u", "shifted_chebyshev_polynomial_v",
    "shifted_chebyshev_polynomial_w", "spherical_bessel_j0", "zeta",
)
_PROMOTED_BY_TORCH = (
    "add", "sub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "hypot",
    "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge", "equal", "where", "outer", "kron",
)

# To the half dtype.

WHITELIST: tuple[Row, ...] = (
    Row("torch", ("addbmm", "addmm", "baddbmm", "bmm", "matmul", "mm"), Rule.HALF, _MATRIX),
    Row("torch", ("dsmm", "spmm"), Rule.HALF, "Another name of torch.mm: a matrix product."),
    Row("torch", ("addmv", "addr", "mv"), Rule.HALF, _VECTOR),
    Row("torch", _CONVOLUTIONS, Rule.HALF, _CONVOLUTION),
    Row("torch", ("_convolution", "convolution", "cudnn_convolution",
                  "cudnn_convolution_transpose"), Rule.HALF, _CONVOLUTION),
    Row("torch", _RECURRENTS, Rule.HALF, _RECURRENT),
    Row("torch", ("_scaled_dot_product_flash_attention",), Rule.HALF, _ATTENTION),
    Row("torch", ("prelu",), Rule.HALF, _PRELU),
    Row("torch", ("matrix_power",), Rule.POWER, _POWER),
    Row("torch.Tensor", ("__matmul__", "addbmm", "addmm", "baddbmm", "bmm", "matmul", "mm"),
        Rule.HALF, _MATRIX),
    Row("torch.Tensor", ("addmv", "addr", "mv"), Rule.HALF, _VECTOR),
    Row("torch.Tensor", ("prelu",), Rule.HALF, _PRELU),
    Row("torch.Tensor", ("matrix_power",), Rule.POWER, _POWER),
    Row("torch.nn.functional", ("linear",), Rule.HALF, _MATRIX),
    Row("torch.nn.functional", _CONVOLUTIONS, Rule.HALF, _CONVOLUTION),
    Row("torch.nn.functional", ("scaled_dot_product_attention",), Rule.HALF, _ATTENTION),
    Row("torch.nn.functional", ("prelu",), Rule.HALF, _PRELU),
    Row("torch._VF", ("chain_matmul",), Rule.HALF, _INSIDE),
    Row("torch._VF", ("einsum",), Rule.CONTRACTION, _CONTRACTION),
    Row("torch._VF", _RECURRENTS, Rule.HALF, _RECURRENT),
    Row("torch.linalg", ("matmul",), Rule.HALF, _MATRIX),
    Row("torch.linalg", ("multi_dot", "vecdot"), Rule.HALF, _INSIDE),
    Row("torch.linalg", ("matrix_power",), Rule.POWER, _POWER),
)

# To FP32.

BLACKLIST: tuple[Row, ...] = (
    Row("torch", ("cosh", "exp", "sinh"), Rule.FLOAT, _EXPONENTIAL),
    Row("torch", ("log", "log10", "log2"), Rule.FLOAT, _LOGARITHM),
    Row("torch", ("expm1", "log1p"), Rule.FLOAT, _NEAR_ZERO),
    Row("torch", ("acos", "arccos", "arcsin", "asin", "erfinv", "tan"), Rule.FLOAT, _STEEP),
    Row("torch", ("reciprocal", "rsqrt"), Rule.FLOAT, _INVERSE),
    Row("torch", ("pow", "square"), Rule.FLOAT, _SQUARE),
    Row("torch", ("cosine_similarity", "dist", "frobenius_norm", "norm_except_dim",
                  "pairwise_distance", "pdist", "renorm"), Rule.FLOAT, _NORM),
    Row("torch", ("nuclear_norm",), Rule.FLOAT, _SINGULAR),
    Row("torch", ("group_norm", "layer_norm", "native_layer_norm", "rms_norm"),
        Rule.FLOAT, _NORMALIZE),
    Row("torch", ("logsumexp",), Rule.FLOAT, _SOFTMAX),
    Row("torch", ("log_softmax", "softmax"), Rule.FLOAT_UNLESS_DTYPE, _SOFTMAX),
    Row("torch", ("corrcoef", "cov"), Rule.FLOAT, _COVARIANCE),
    Row("torch", ("cumulative_trapezoid", "trapezoid", "trapz"), Rule.FLOAT, _TOTAL),
    Row("torch", ("cumprod", "cumsum", "prod", "sum"), Rule.FLOAT_UNLESS_DTYPE, _TOTAL),
    Row("torch", ("cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss",
                  "triplet_margin_loss"), Rule.FLOAT, _LOSS),
    Row("torch", ("binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss"),
        Rule.FLOAT, _LOG_LOSS),
    Row("torch.Tensor", ("cosh", "exp", "sinh"), Rule.FLOAT, _EXPONENTIAL),
    Row("torch.Tensor", ("log", "log10", "log2"), Rule.FLOAT, _LOGARITHM),
    Row("torch.Tensor", ("expm1", "log1p"), Rule.FLOAT, _NEAR_ZERO),
    Row("torch.Tensor", ("acos", "arccos", "arcsin", "asin", "erfinv", "tan"), Rule.FLOAT, _STEEP),
    Row("torch.Tensor", ("reciprocal", "rsqrt"), Rule.FLOAT, _INVERSE),
    Row("torch.Tensor", ("__pow__", "pow", "square"), Rule.FLOAT, _SQUARE),
    Row("torch.Tensor", ("dist", "renorm"), Rule.FLOAT, _NORM),
    Row("torch.Tensor", ("logsumexp",), Rule.FLOAT, _SOFTMAX),
    Row("torch.Tensor", ("log_softmax", "softmax"), Rule.FLOAT_UNLESS_DTYPE, _SOFTMAX),
    Row("torch.Tensor", ("corrcoef", "cov"), Rule.FLOAT, _COVARIANCE),
    Row("torch.Tensor", ("sum_to_size",), Rule.FLOAT, _TOTAL),
    Row("torch.Tensor", ("cumprod", "cumsum", "prod", "sum"), Rule.FLOAT_UNLESS_DTYPE, _TOTAL),
    Row("torch.nn.functional", ("cosine_similarity", "pairwise_distance", "pdist"),
        Rule.FLOAT, _NORM),
    Row("torch.nn.functional", ("softplus",), Rule.FLOAT,
        "It is log(1 + exp(x)): in FP16 a small exponential disappears beside the 1."),
    Row("torch._C._nn", ("huber_loss", "l1_loss", "mse_loss", "multi_margin_loss",
                         "multilabel_margin_loss", "smooth_l1_loss"), Rule.FLOAT, _LOSS),
    Row("torch._C._nn", ("cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd",
                         "soft_margin_loss"), Rule.FLOAT, _LOG_LOSS),
    Row("torch._C._nn", ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
                         "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
                         "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
                         "_upsample_bilinear2d_aa", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
                         "upsample_trilinear3d"), Rule.FLOAT, _RESIZE),
    Row("torch._VF", ("cdist",), Rule.FLOAT, _NORM),
    Row("torch._VF", ("norm",), Rule.FLOAT_UNLESS_DTYPE, _NORM),
    Row("torch.linalg", ("matrix_norm", "norm", "vector_norm"), Rule.FLOAT_UNLESS_DTYPE, _NORM),
    Row("torch.linalg", ("matrix_sqrth",), Rule.FLOAT, _EIGEN),
    Row("torch.special", ("expm1", "log1p"), Rule.FLOAT, _NEAR_ZERO),
    Row("torch.special", ("erfinv",), Rule.FLOAT, _STEEP),
    Row("torch.special", ("logsumexp",), Rule.FLOAT, _SOFTMAX),
    Row("torch.special", ("log_softmax", "softmax"), Rule.FLOAT_UNLESS_DTYPE, _SOFTMAX),
)

# To the widest floating dtype among the inputs.

PROMOTE: tuple[Row, ...] = (
    Row("torch", ("addcdiv", "addcmul", "arctan2", "atan2"), Rule.PROMOTE, _ZERO_DIM),
    Row("torch", ("bilinear", "cross", "dot", "inner", "vdot"), Rule.PROMOTE, _ONE_DTYPE),
    Row("torch", ("grid_sampler",), Rule.FLOAT_ON_CPU, _OUT_OF_BOUNDS),
    Row("torch", ("index_put", "scatter_add"), Rule.PROMOTE, _WRITES),
    Row("torch.Tensor", ("addcdiv", "addcmul", "arctan2", "atan2"), Rule.PROMOTE, _ZERO_DIM),
    Row("torch.Tensor", ("cross", "dot", "inner", "vdot"), Rule.PROMOTE, _ONE_DTYPE),
    Row("torch.Tensor", ("index_put", "scatter_add"), Rule.PROMOTE, _WRITES),
    Row("torch.nn.functional", ("bilinear",), Rule.PROMOTE, _ONE_DTYPE),
    Row("torch._VF", ("tensordot",), Rule.PROMOTE, _ONE_DTYPE),
    Row("torch", _PROMOTED_BY_TORCH, Rule.PROMOTE, _DONE_BY_TORCH, done_by_torch=True),
    Row("torch.Tensor", _PROMOTED_BY_TORCH, Rule.PROMOTE, _DONE_BY_TORCH, done_by_torch=True),
    Row("torch", ("cat", "dstack", "hstack", "stack", "vstack"),
        Rule.PROMOTE, _DONE_BY_TORCH, done_by_torch=True),
    Row("torch.Tensor", ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__",
                         "__div__", "__truediv__", "__floordiv__", "__mod__", "__eq__", "__ne__",
                         "__lt__", "__le__", "__gt__", "__ge__"),
        Rule.PROMOTE, _DONE_BY_TORCH, done_by_torch=True),
)

# Refused in half.

BANNED: tuple[Row, ...] = (
    Row(
        "torch._C._nn",
        ("binary_cross_entropy",),
        Rule.BANNED,
        "Half rounds probabilities near 0 or 1 to exactly 0 or 1, and the loss then takes the"
        " logarithm of zero; leave out the sigmoid and use binary_cross_entropy_with_logits"
        " (BCEWithLogitsLoss), which is safe with half logits.",
    ),
)

# Beyond autocast: calls that PyTorch refuses with the dtypes that casts produce.

BEYOND: tuple[Row, ...] = (
    Row("torch", _WRITERS, Rule.PROMOTE, _WRITES),
    Row("torch", ("index_put_",), Rule.LIKE_FIRST, _INTO),
    Row("torch", ("embedding", "embedding_bag"), Rule.PROMOTE, _ONE_DTYPE),
    Row("torch.Tensor", _WRITERS, Rule.PROMOTE, _WRITES),
    Row("torch.Tensor", _WRITERS_IN_PLACE, Rule.LIKE_FIRST, _INTO),
    Row("torch.linalg", ("cross",), Rule.PROMOTE, _ONE_DTYPE),
    Row("torch.sparse", ("addmm", "mm"), Rule.PROMOTE, _ONE_DTYPE),
    Row("torch", (*_DECOMPOSITIONS, "_lu_with_info"), Rule.FLOAT, _DECOMPOSITION),
    Row("torch.Tensor", _DECOMPOSITIONS, Rule.FLOAT, _DECOMPOSITION),
    Row("torch.linalg", _LINALG, Rule.FLOAT, _DECOMPOSITION),
    Row("torch", ("ctc_loss", "histogram", "histogramdd", "nanquantile", "polar", "quantile"),
        Rule.FLOAT, _NO_HALF),
    Row("torch", ("histc", "nanmean"), Rule.FLOAT, _COUNTS),
    Row("torch", ("rrelu",), Rule.FLOAT_ON_CPU, _NO_HALF_ON_CPU),
    Row("torch", ("complex", "view_as_complex"), Rule.FLOAT, _NO_COMPLEX),
    Row("torch.Tensor", ("histogram", "nanquantile", "quantile"), Rule.FLOAT, _NO_HALF),
    Row("torch.Tensor", ("histc", "nanmean"), Rule.FLOAT, _COUNTS),
    Row("torch.nn.functional", ("avg_pool3d",), Rule.FLOAT_ON_CPU, _NO_HALF_ON_CPU),
    Row("torch.sparse", ("sampled_addmm",), Rule.FLOAT,
        "PyTorch has a half kernel for it in some versions only, on CUDA."),
    Row("torch.special", _SPECIAL, Rule.FLOAT, _NO_HALF),
    Row("torch", ("matrix_exp",), Rule.FLOAT, _SERIES),
    Row("torch.Tensor", ("matrix_exp",), Rule.FLOAT, _SERIES),
    Row("torch.linalg", ("matrix_exp", "vander"), Rule.FLOAT, _SERIES),
    Row("torch.fft", _TRANSFORMS, Rule.FLOAT, _FOURIER),
    Row("torch", ("istft",), Rule.FLOAT, _FOURIER),
    Row("torch._VF", ("istft", "stft"), Rule.FLOAT, _FOURIER),
)

# At every level: functions that PyTorch computes wrongly in half.  If a row above casts the call to
# half too, the call still sums in FP32 internally.

EVERY_LEVEL: tuple[Row, ...] = (
    Row("torch", ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"), Rule.FLOAT_ON_CPU,
        _OUT_OF_BOUNDS),
    Row("torch._C._nn", ("cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd"),
        Rule.FLOAT, "It counts targets in the dtype of its input: in FP16 the count is inf from"
        " 65,505 on, so the mean and its gradient are 0."),
    Row("torch", ("layer_norm", "native_layer_norm"), Rule.FLOAT_ON_CPU, "On the CPU PyTorch sums"
        " the gradients of half weights over all rows in half.", only_gradient=True),
    Row("torch", ("batch_norm", "instance_norm"),
        Rule.FLOAT_ON_CPU_IF_HALF_WEIGHT, "With half weights the CPU keeps the mean of the batch in"
        " half, which makes every gradient wrong; with FP32 statistics it raises an error."),
    Row("torch", ("embedding", "embedding_bag"), Rule.FLOAT_ON_CPU_UNLESS_SPARSE, _READ_OFTEN,
        only_gradient=True),
    Row("torch", ("take",), Rule.FLOAT_ON_CPU, _READ_OFTEN, only_gradient=True),
    Row("torch.Tensor", ("take",), Rule.FLOAT_ON_CPU, _READ_OFTEN, only_gradient=True),
    Row("torch", ("index_select", "repeat_interleave"), Rule.FLOAT_ON_CPU_IF_VECTOR, _READ_OFTEN,
        only_gradient=True),
    Row("torch.Tensor", ("index_select", "repeat_interleave"), Rule.FLOAT_ON_CPU_IF_VECTOR,
        _READ_OFTEN, only_gradient=True),
    Row("torch", ("index_add",), Rule.FLOAT_ON_CPU_IF_VECTOR, _ADDED_INTO),
    Row("torch.Tensor", ("index_add", "index_add_"), Rule.FLOAT_ON_CPU_IF_VECTOR, _ADDED_INTO),
    Row("torch", ("index_put", "index_put_", "put"), Rule.FLOAT_ON_CPU_IF_ADDING, _ADDED_INTO),
    Row("torch.Tensor", ("index_put", "index_put_", "put", "put_"), Rule.FLOAT_ON_CPU_IF_ADDING,
        _ADDED_INTO),
    Row("torch", ("index_reduce",), Rule.FLOAT_ON_CPU, _ADDED_INTO),
    Row("torch.Tensor", ("index_reduce", "index_reduce_"), Rule.FLOAT_ON_CPU, _ADDED_INTO),
    Row("torch", ("segment_reduce",), Rule.FLOAT_ON_CPU, "On the CPU PyTorch sums the rows of a"
        " segment in half."),
    Row("torch", ("addbmm",), Rule.FLOAT_ON_CPU, _MATRICES),
    Row("torch.Tensor", ("addbmm", "addbmm_"), Rule.FLOAT_ON_CPU, _MATRICES),
    Row("torch", ("bilinear",), Rule.FLOAT_ON_CPU, _OUTPUTS, only_gradient=True),
    Row("torch.nn.functional", ("bilinear",), Rule.FLOAT_ON_CPU, _OUTPUTS, only_gradient=True),
    Row("torch", ("adaptive_avg_pool1d", "adaptive_max_pool1d", "avg_pool1d", "max_pool1d",
                  "max_pool1d_with_indices", "max_pool2d", "max_pool3d"),
        Rule.FLOAT_ON_CPU_IF_OVERLAPPING, _OF_WINDOWS, only_gradient=True),
    Row("torch._C._nn", ("adaptive_avg_pool2d", "adaptive_max_pool2d", "adaptive_max_pool3d",
                         "max_pool2d_with_indices", "max_pool3d_with_indices"),
        Rule.FLOAT_ON_CPU_IF_OVERLAPPING, _OF_WINDOWS, only_gradient=True),
    Row("torch._C._nn", ("adaptive_avg_pool3d", "col2im"), Rule.FLOAT_ON_CPU, _WINDOWS),
    Row("torch._C._nn", ("im2col",), Rule.FLOAT_ON_CPU, _OF_WINDOWS, only_gradient=True),
    Row("torch.nn.functional", ("adaptive_avg_pool1d", "avg_pool1d", "avg_pool2d"),
        Rule.FLOAT_ON_CPU_IF_OVERLAPPING, _OF_WINDOWS, only_gradient=True),
    Row("torch._C._nn", ("pad",), Rule.FLOAT_ON_CPU_IF_ADDING, "On the CPU PyTorch sums in half"
        " the gradients of all positions that repeat an edge value.", only_gradient=True),
    Row("torch", ("histc",), Rule.FLOAT_ON_CPU, _COUNTS),
    Row("torch.Tensor", ("histc",), Rule.FLOAT_ON_CPU, _COUNTS),
    Row("torch.sparse", ("addmm", "mm", "sum"), Rule.FLOAT_ON_CPU, _ENTRIES),
    Row("torch.Tensor", ("coalesce", "to_dense"), Rule.FLOAT_ON_CPU, _ENTRIES),
)

# Only with apex's tables: these rows are added, and replace a row above for the same place.

_SPREAD = "It sums squared differences, and a square overflows FP16 from 256 on."
_IN_PLACE = (
    "It belongs in FP32, but its result would go into the half tensor;"
    " use the function without the underscore, x = x.exp() for x.exp_()."
)

APEX: tuple[Row, ...] = (
    Row("torch", ("std", "var"), Rule.FLOAT, _SPREAD),
    Row("torch.Tensor", ("std", "var"), Rule.FLOAT, _SPREAD),
    Row("torch.Tensor", ("cpu",), Rule.FLOAT,
        "Tensors moved to the CPU are mostly for metrics, which expect FP32."),
    Row("torch.Tensor", ("__ipow__",), Rule.FLOAT,
        "A square overflows FP16 from 256 on; x **= 2 assigns to x, so x may become FP32."),
    Row("torch.nn.functional", ("gelu",), Rule.FLOAT,
        "Its tanh form cubes the input, which overflows FP16 from 41 on."),
    Row("torch", ("grid_sampler",), Rule.FLOAT,
        "Half coordinates have 11 bits, too few for positions between pixels of a large image."),
    Row("torch.nn.functional", ("interpolate",), Rule.FLOAT, _RESIZE),
    Row("torch", ("acos_", "arccos_", "arcsin_", "asin_", "cosh_", "exp_", "expm1_", "log_",
                  "log10_", "log2_", "reciprocal_", "rsqrt_", "sinh_", "tan_"),
        Rule.REFUSE_IN_PLACE, _IN_PLACE),
    Row("torch.Tensor", ("acos_", "arccos_", "arcsin_", "asin_", "cosh_", "cumprod_", "cumsum_",
                         "erfinv_", "exp_", "expm1_", "log_", "log10_", "log2_", "pow_",
                         "reciprocal_", "renorm_", "rsqrt_", "sinh_", "tan_"),
        Rule.REFUSE_IN_PLACE, _IN_PLACE),
)
