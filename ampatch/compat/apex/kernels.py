"""apex's compiled modules: the names that programs look up, also those that are not here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

from . import amp_c
from .packages import replacement

_LAYER_NORM = """
    backward backward_affine forward forward_affine forward_affine_mixed_dtypes rms_backward
    rms_backward_affine rms_forward rms_forward_affine rms_forward_affine_mixed_dtypes
"""
_SOFTMAX = "backward forward get_batch_per_block"
NAMES = {
    "amp_C": """
        multi_tensor_adagrad multi_tensor_adam multi_tensor_adam_capturable
        multi_tensor_adam_capturable_master multi_tensor_axpby multi_tensor_l2norm_mp
        multi_tensor_l2norm_scale multi_tensor_lamb multi_tensor_lamb_compute_update_term
        multi_tensor_lamb_mp multi_tensor_lamb_stage1_cuda multi_tensor_lamb_stage2_cuda
        multi_tensor_lamb_update_weights multi_tensor_lars multi_tensor_novograd multi_tensor_sgd
        multi_tensor_unscale_l2norm update_scale_hysteresis
    """,
    "apex_C": "",
    "fused_adam_cuda": """
        adam adam_mt adam_undo maybe_adam_undo maybe_cast maybe_cast_mt reversible_adam
        strided_check_finite
    """,
    "fused_dense_cuda": """
        linear_bias_backward linear_bias_forward linear_gelu_linear_backward
        linear_gelu_linear_forward
    """,
    "fused_layer_norm_cuda": _LAYER_NORM,
    "fused_mix_prec_layer_norm_cuda": _LAYER_NORM,
    "generic_scaled_masked_softmax_cuda": _SOFTMAX,
    "mlp_cuda": "backward forward",
    "scaled_masked_softmax_cuda": _SOFTMAX,
    "scaled_softmax_cuda": _SOFTMAX,
    "scaled_upper_triang_masked_softmax_cuda": _SOFTMAX,
    "syncbn": """
        batchnorm_backward batchnorm_backward_c_last batchnorm_forward batchnorm_forward_c_last
        reduce_bn reduce_bn_c_last relu_bw_c_last welford_mean_var welford_mean_var_c_last
        welford_parallel
    """,
}
"""Functions of each module, without those that are here."""

_HERE = {"amp_C": ("multi_tensor_l2norm", "multi_tensor_scale"), "apex_C": ("flatten", "unflatten")}


class Missing:
    """A function of apex's that is not here: it can be looked up, and a call is an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}, which ampatch's apex does not have>"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self._name}(...): a kernel of apex's, which ampatch's apex does not have; "
            f"{replacement(self._name)}. Where a program looks the name up and never calls it, "
            "there is nothing to do."
        )


def contents() -> dict[str, SimpleNamespace]:
    """The contents of the modules, by name."""
    made = {}
    for module, missing in NAMES.items():
        names: dict[str, Any] = {name: Missing(f"{module}.{name}") for name in missing.split()}
        names |= {name: getattr(amp_c, name) for name in _HERE.get(module, ())}
        made[module] = SimpleNamespace(**names, __all__=sorted(names), __doc__=None)
    return made
