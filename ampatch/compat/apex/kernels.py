"""apex's compiled modules: which a program can import, and why.

Programs import a module to find out whether it has a kernel.  So only modules whose functions
compute can be imported.  The import of any other fails, and the error says what to use.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

from . import amp_c
from .layer_kernels import CAUSAL_SOFTMAX, LAYER_NORM, MASKED_SOFTMAX, MIXED_LAYER_NORM, SOFTMAX
from .packages import replacement

_LISTS = ("multi_tensor_adam", "multi_tensor_l2norm", "multi_tensor_scale")
KERNELS: dict[str, tuple[dict[str, Any], str]] = {
    "amp_C": (
        {name: getattr(amp_c, name) for name in _LISTS},
        "imported unguarded; most programs look functions up that they never call (LOOKED_UP)",
    ),
    "apex_C": (
        {"flatten": amp_c.flatten, "unflatten": amp_c.unflatten},
        "DDP code calls it: BERT's pretraining",
    ),
    "fused_adam_cuda": ({"adam": amp_c.adam}, "fairseq and OpenNMT-py probe it, and step with it"),
    "fused_layer_norm_cuda": (LAYER_NORM, "copies of apex's FusedLayerNorm probe and call it"),
    "fused_mix_prec_layer_norm_cuda": (MIXED_LAYER_NORM, "Megatron-LM's layer norm calls it"),
    "generic_scaled_masked_softmax_cuda": (SOFTMAX, "copies of Megatron-LM's softmax call it"),
    "scaled_masked_softmax_cuda": (MASKED_SOFTMAX, "the same"),
    "scaled_softmax_cuda": (SOFTMAX, "the same"),
    "scaled_upper_triang_masked_softmax_cuda": (CAUSAL_SOFTMAX, "the same"),
}
"""The functions of each module, and why ampatch has it."""

REFUSED_MODULES = {
    "fused_dense_cuda": "apex.fused_dense alone imports it unguarded, and ampatch's does not",
    "mlp_cuda": "apex.mlp alone imports it unguarded, and ampatch's does not",
    "syncbn": "apex.parallel alone imports it, in a `try`; its kernels follow CUDA's layout",
}
"""Modules whose import fails, and why ampatch lacks them."""

LOOKED_UP = """
    multi_tensor_adagrad multi_tensor_adam_capturable multi_tensor_adam_capturable_master
    multi_tensor_axpby multi_tensor_l2norm_mp multi_tensor_l2norm_scale multi_tensor_lamb
    multi_tensor_lamb_compute_update_term multi_tensor_lamb_mp multi_tensor_lamb_stage1_cuda
    multi_tensor_lamb_stage2_cuda multi_tensor_lamb_update_weights multi_tensor_lars
    multi_tensor_novograd multi_tensor_sgd multi_tensor_unscale_l2norm update_scale_hysteresis
"""
"""Functions of amp_C that ampatch lacks."""


def _missing(name: str) -> Callable[..., NoReturn]:
    """A function that raises an error: programs look up functions that they never call."""

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name}(...): ampatch's apex lacks this kernel; "
            f"{replacement(name)}. If the program only looks the name up, "
            "nothing is to be done."
        )

    missing.__qualname__ = f"{name} (which ampatch's apex does not have)"
    return missing


def contents() -> dict[str, SimpleNamespace]:
    """The contents of the modules, by name."""
    modules = {}
    for module, (functions, _) in KERNELS.items():
        missing = LOOKED_UP.split() if module == "amp_C" else ()
        names = {name: _missing(f"{module}.{name}") for name in missing} | functions
        modules[module] = SimpleNamespace(**names, __all__=sorted(names), __doc__=None)
    return modules
