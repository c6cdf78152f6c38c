"""apex's compiled modules: the names that programs look up, also those that are not here.

Data, and what stands for a function that is missing: programs look names up that they never call.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

from . import amp_c, apex_c
from .packages import replacement

_SOFTMAX = ("backward", "forward", "get_batch_per_block")
_LAYER_NORM = (
    *("backward", "backward_affine", "forward", "forward_affine", "forward_affine_mixed_dtypes"),
    *("rms_backward", "rms_backward_affine", "rms_forward", "rms_forward_affine"),
    "rms_forward_affine_mixed_dtypes",
)
_LISTS = (
    *("adagrad", "adam", "adam_capturable", "adam_capturable_master", "l2norm_mp", "l2norm_scale"),
    *("lamb", "lamb_compute_update_term", "lamb_mp", "lamb_stage1_cuda", "lamb_stage2_cuda"),
    *("lamb_update_weights", "lars", "novograd", "sgd", "unscale_l2norm"),
)
NAMES = {
    "amp_C": (*(f"multi_tensor_{name}" for name in _LISTS), "update_scale_hysteresis"),
    "apex_C": (),
    "fused_adam_cuda": (
        *("adam", "adam_mt", "adam_undo", "maybe_adam_undo", "maybe_cast", "maybe_cast_mt"),
        *("reversible_adam", "strided_check_finite"),
    ),
    "fused_dense_cuda": (
        *("linear_bias_backward", "linear_bias_forward"),
        *("linear_gelu_linear_backward", "linear_gelu_linear_forward"),
    ),
    "fused_layer_norm_cuda": _LAYER_NORM,
    "fused_mix_prec_layer_norm_cuda": _LAYER_NORM,
    "generic_scaled_masked_softmax_cuda": _SOFTMAX,
    "mlp_cuda": ("backward", "forward"),
    "scaled_masked_softmax_cuda": _SOFTMAX,
    "scaled_softmax_cuda": _SOFTMAX,
    "scaled_upper_triang_masked_softmax_cuda": _SOFTMAX,
    "syncbn": (
        *("batchnorm_backward", "batchnorm_backward_c_last", "batchnorm_forward"),
        *("batchnorm_forward_c_last", "reduce_bn", "reduce_bn_c_last", "relu_bw_c_last"),
        *("welford_mean_var", "welford_mean_var_c_last", "welford_parallel"),
    ),
}
"""Functions of each module, without those that are here."""

_HERE: dict[str, Any] = {"amp_C": amp_c, "apex_C": apex_c}


class Missing:
    """A function of apex's that is not here: it can be looked up, and a call is an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}, which ampatch's apex does not have>"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises `NotImplementedError`, which says what to use."""
        raise NotImplementedError(
            f"{self._name}(...): a kernel of apex's, which ampatch's apex does not have; "
            f"{replacement(self._name)}. Where a program looks the name up and never calls it, "
            "there is nothing to do."
        )


def contents() -> dict[str, SimpleNamespace]:
    """The contents of the modules, by name."""
    made = {}
    for module, missing in NAMES.items():
        here = _HERE.get(module)
        names: dict[str, Any] = {name: Missing(f"{module}.{name}") for name in missing}
        names |= {name: getattr(here, name) for name in getattr(here, "__all__", ())}
        doc = getattr(here, "__doc__", f"{module}: names of apex's kernels; a call is an error.")
        made[module] = SimpleNamespace(**names, __all__=sorted(names), __doc__=doc)
    return made
