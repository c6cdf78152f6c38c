"""Where the tables differ from `torch.autocast` for CUDA and from apex: data and look-ups.

A test compares the entries for autocast with the answers of PyTorch's dispatcher.  The
entries for apex are the functions that its `amp/lists` and its code for recurrent cells
name, under the names of ampatch's rows.
"""

from __future__ import annotations

from ampatch.casting.tables import Row, Rule

AUTOCAST = {
    Rule.CONTRACTION: "runs every equation in half on CUDA; on the CPU as ampatch.",
    Rule.POWER: "runs the products of a negative power in half.",
    Rule.PROMOTE: "raises RuntimeError for inputs of the other half dtype.",
    Rule.BANNED: "raises RuntimeError whatever the dtype, for FP32 too.",
}
"""Rules that autocast treats differently.  PyTorch promotes some rows itself, for both."""

AUTOCAST_OF_ROWS = {
    "torch.corrcoef": "runs the product inside in half.",
    "torch.Tensor.corrcoef": "runs the product inside in half.",
    "torch.Tensor.sum_to_size": "does not cast if the tensor has that size already.",
    "torch.grid_sampler": "promotes on CUDA, and raises RuntimeError for inputs of the other half "
    "dtype; on the CPU it casts to FP32.",
    "torch.sparse.addmm": "runs the addmm inside in half; a backward pass outside the region "
    "then raises RuntimeError.",
    "torch.nn.functional.interpolate": 'casts to FP32 too, but not mode="area".',
}
"""Rows that autocast treats differently, by their first function."""
AT_EVERY_LEVEL = "runs them in FP32 in its regions only."
NO_CAST = "has no cast"
"""What autocast does for rows that only ampatch has, unless `AUTOCAST_OF_ROWS` says it."""

APEX = {
    Rule.HALF: (
        "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d linear"
        " addbmm addmm addmv addr baddbmm bmm matmul mm mv prelu __matmul__"
        " gru gru_cell lstm lstm_cell rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell"
    ),
    Rule.FLOAT: (
        "acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss cosine_similarity"
        " cross_entropy_loss cumprod cumsum dist erfinv exp expm1 grid_sampler group_norm"
        " hinge_embedding_loss kl_div l1_loss layer_norm log log10 log2 log_softmax"
        " margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss"
        " nll_loss2d nll_loss_nd norm poisson_nll_loss pow __pow__ prod reciprocal renorm rsqrt"
        " sinh smooth_l1_loss soft_margin_loss softmax softplus sum tan triplet_margin_loss"
        " upsample_bicubic2d _upsample_bicubic2d_aa upsample_bilinear2d _upsample_bilinear2d_aa"
        " upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d"
        " _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d"
        " upsample_trilinear3d"
    ),
    Rule.PROMOTE: "addcdiv addcmul atan2 bilinear cross dot",
    Rule.BANNED: "binary_cross_entropy",
}
"""Apex's rule for a function.  Apex patched `F.cross_entropy`, ampatch patches the leaf below."""

_NEWER = ("torch.fft", "torch.linalg", "torch.sparse", "torch.special")  # than apex's lists

_RULE_OF = {name: rule for rule, names in APEX.items() for name in names.split()}


def from_autocast(row: Row, is_extra: bool) -> str:
    """How autocast for CUDA treats the functions of a row differently, or nothing."""
    by_rule = NO_CAST if is_extra else AUTOCAST.get(row.rule, "")
    return "" if row.done_by_torch else AUTOCAST_OF_ROWS.get(f"{row.where}.{row.names[0]}", by_rule)


def from_apex(row: Row) -> str:
    """How apex treated the functions of a row differently, or nothing."""
    if row.done_by_torch:
        return ""
    names_by_difference: dict[str, list[str]] = {}
    for name in row.names:
        rule = None if row.where in _NEWER else _RULE_OF.get(name)
        if rule is not _rule_of_apex(row.rule):
            difference = NO_CAST if rule is None else f"has the rule {rule.value}"
            names_by_difference.setdefault(difference, []).append(name)
    return "; ".join(
        difference if len(names) == len(row.names) else f"{difference} for {' '.join(names)}"
        for difference, names in names_by_difference.items()
    )


def _rule_of_apex(rule: Rule) -> Rule:
    """The same rule in apex, which had no exception for `dtype=`."""
    return Rule.FLOAT if rule is Rule.FLOAT_UNLESS_DTYPE else rule
