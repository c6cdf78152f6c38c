"""Operators of `op_db` that are in no table but call functions that are.

They are written in Python, in torch or in `op_db` itself, so their rules are
those of the functions they call.  `test_op_db.py` counts the calls: an entry
that is missing here, or meets other rows than it says, fails there.
"""

LOW_RANK = (
    "torch.Tensor.__matmul__", "torch.Tensor.matmul", "torch.linalg.qr", "torch.linalg.svd",
    "torch.matmul",
)  # fmt: skip
WINDOWS = ("hamming", "hann", "blackman", "general_cosine", "general_hamming", "nuttall")
CHUNKS = (
    "torch.mm torch.Tensor.sum torch._C._nn.cross_entropy_loss torch.nn.functional.linear"
    " torch.Tensor.index_select"
)
NEAREST = tuple(f"torch._C._nn.upsample_nearest{n}d" for n in (1, 2, 3))

COMPOSITES: dict[str, tuple[str, ...]] = {
    # The builtin below has a longer name than the function.
    "nn.functional.cross_entropy": ("torch._C._nn.cross_entropy_loss",),
    "nn.functional.nll_loss": ("torch._C._nn.nll_loss_nd",),
    "nn.functional.grid_sample": ("torch.grid_sampler",),
    "nn.functional.interpolate-nearest": NEAREST,
    "nn.functional.interpolate-nearest-exact": tuple(
        f"torch._C._nn._upsample_nearest_exact{n}d" for n in (1, 2, 3)
    ),
    "nn.functional.interpolate-linear": ("torch._C._nn.upsample_linear1d",),
    "nn.functional.interpolate-bilinear": ("torch._C._nn.upsample_bilinear2d",),
    "nn.functional.interpolate-bicubic": ("torch._C._nn.upsample_bicubic2d",),
    "nn.functional.interpolate-trilinear": ("torch._C._nn.upsample_trilinear3d",),
    "nn.functional.upsample_bilinear": ("torch._C._nn.upsample_bilinear2d",),
    "nn.functional.upsample_nearest": NEAREST,
    # Operators whose other operand comes first.
    "__rdiv__": ("torch.Tensor.reciprocal",),
    "__rmatmul__": ("torch.matmul",),
    "__rpow__": ("torch.pow",),
    # Norms: torch.norm and Tensor.norm choose between several functions.
    "norm": ("torch.linalg.vector_norm",),
    "norm-fro": ("torch.linalg.vector_norm",),
    "norm-inf": ("torch.linalg.vector_norm",),
    "norm-nuc": ("torch.linalg.matrix_norm",),
    "nn.functional.normalize": ("torch.linalg.vector_norm",),
    "nn.functional.local_response_norm": (
        "torch.Tensor.pow",
        "torch._C._nn.pad",
        "torch.nn.functional.avg_pool2d",
    ),
    # Pools have one function for the values and one for their places too.
    "nn.functional.interpolate-area": (
        "torch.nn.functional.adaptive_avg_pool1d",
        "torch._C._nn.adaptive_avg_pool2d",
        "torch._C._nn.adaptive_avg_pool3d",
    ),
    "nn.functional.max_pool1d": ("torch.max_pool1d", "torch.max_pool1d_with_indices"),
    "nn.functional.max_pool2d": ("torch.max_pool2d", "torch._C._nn.max_pool2d_with_indices"),
    "nn.functional.max_pool3d": ("torch.max_pool3d", "torch._C._nn.max_pool3d_with_indices"),
    "max_pool2d_with_indices_backward": ("torch._C._nn.max_pool2d_with_indices",),
    "nn.functional.unfold": ("torch._C._nn.im2col",),
    # Losses and activations made of several steps.
    "nn.functional.softmin": ("torch.Tensor.softmax",),
    "nn.functional.softmin-with_dtype": ("torch.Tensor.softmax",),
    "nn.functional.smooth_l1_loss": ("torch._C._nn.l1_loss", "torch._C._nn.smooth_l1_loss"),
    "nn.functional.multilabel_soft_margin_loss": ("torch.Tensor.sum",),
    "nn.functional.triplet_margin_with_distance_loss": (
        "torch.nn.functional.pairwise_distance",
        "torch.sum",  # op_db's own distance sums
    ),
    "nn.functional.gaussian_nll_loss": ("torch.Tensor.__pow__", "torch.Tensor.sum", "torch.log"),
    "nn.functional.linear_cross_entropy": (
        "torch._C._nn.cross_entropy_loss",
        "torch.nn.functional.linear",
    ),
    "nn.functional.linear_cross_entropy-chunked": (
        *CHUNKS.split(),
        "torch.Tensor.dot",
    ),
    "nn.functional.linear_cross_entropy-chunked_none": tuple(CHUNKS.split()),
    "nn.functional.multi_head_attention_forward": (
        "torch.Tensor.softmax",
        "torch._C._nn.pad",
        "torch.baddbmm",
        "torch.bmm",
        "torch.nn.functional.linear",
    ),
    # Products around a decomposition; op_db's function for pinv makes its argument by one.
    "linalg.pinv-singular": ("torch.Tensor.__matmul__", "torch.linalg.pinv"),
    "pca_lowrank": LOW_RANK,
    "svd_lowrank": LOW_RANK,
    # Written in Python above builtins of other names.
    "lu": ("torch._lu_with_info",),
    "stft": ("torch._C._nn.pad", "torch._VF.stft"),
    # Windows compute with a tensor of their own, in the dtype asked for.
    **{f"signal.windows.{name}": ("torch.Tensor.sum",) for name in WINDOWS},
    "signal.windows.exponential": ("torch.exp",),
    "signal.windows.gaussian": ("torch.Tensor.__pow__", "torch.exp"),
    "signal.windows.kaiser": ("torch.pow",),
    # torch.masked.
    "masked.sum": ("torch.sum",),
    "masked.prod": ("torch.Tensor.prod",),
    "masked.cumsum": ("torch.cumsum",),
    "masked.cumprod": ("torch.cumprod",),
    "masked.mean": ("torch.Tensor.sum", "torch.sum"),
    "masked.var": ("torch.Tensor.sum", "torch.sum"),
    "masked.std": ("torch.Tensor.sum", "torch.sum"),
    "masked.norm": ("torch.linalg.vector_norm",),
    "masked.normalize": ("torch.linalg.vector_norm",),
    "masked.softmax": ("torch.Tensor.softmax",),
    "masked.softmin": ("torch.Tensor.softmax",),
    "masked.log_softmax": ("torch.Tensor.log_softmax",),
    "masked.logsumexp": ("torch.logsumexp",),
}

SOMETIMES: dict[str, set[str]] = {
    "nn.functional.linear_cross_entropy-chunked": {"torch.dot"},
    "nn.functional.linear_cross_entropy-chunked_none": {"torch._VF.einsum"},
}
"""What these meet besides, with some versions of torch."""
