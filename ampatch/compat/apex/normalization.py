"""apex.normalization: torch's own layers under apex's names and arguments."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedRMSNorm",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
]


def fused_layer_norm(input: Tensor, normalized_shape: Any, eps: float = 1e-6) -> Tensor:
    """`torch.nn.functional.layer_norm` without weights."""
    return F.layer_norm(input, _shape(normalized_shape), eps=eps)


def fused_layer_norm_affine(
    input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Any, eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.layer_norm`."""
    return F.layer_norm(input, _shape(normalized_shape), weight, bias, eps)


def fused_rms_norm(input: Tensor, normalized_shape: Any, eps: float = 1e-6) -> Tensor:
    """`torch.nn.functional.rms_norm` without weights."""
    return F.rms_norm(input, _shape(normalized_shape), eps=eps)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Any, eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.rms_norm`."""
    return F.rms_norm(input, _shape(normalized_shape), weight, eps)


def _shape(normalized_shape: Any) -> list[int]:
    return [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)


class FusedLayerNormAffineFunction:
    """Has `apply` but is not an autograd Function: torch's layer norm has a backward of its own."""

    apply = staticmethod(fused_layer_norm_affine)


class _ApexArguments:
    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient


class FusedLayerNorm(_ApexArguments, nn.LayerNorm):
    """`torch.nn.LayerNorm`.  `memory_efficient` is accepted and changes nothing."""


class FusedRMSNorm(_ApexArguments, nn.RMSNorm):
    """`torch.nn.RMSNorm`.  `memory_efficient` is accepted and changes nothing."""


class _MixedDtypes:
    _name: str  # a function of torch.nn.functional, looked up at each call

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, **kwargs: Any) -> None:
        if not kwargs.pop("elementwise_affine", True):
            raise RuntimeError(
                "the Mixed norms have weights: elementwise_affine=False is not possible. Use "
                "FusedLayerNorm or FusedRMSNorm."
            )
        super().__init__(normalized_shape, eps=eps, **kwargs)

    def forward(self, input: Tensor) -> Tensor:
        """Compute in FP32; the output has the dtype of the weight."""
        params = [param.float() for param in self._parameters.values()]
        norm = getattr(F, self._name)
        output = norm(input.float(), self.normalized_shape, *params, eps=self.eps)
        return output.to(self.weight.dtype)


class MixedFusedLayerNorm(_MixedDtypes, FusedLayerNorm):
    """A layer norm whose input may have another dtype than its weight; see `forward`."""

    _name = "layer_norm"


class MixedFusedRMSNorm(_MixedDtypes, FusedRMSNorm):
    """An RMS norm whose input may have another dtype than its weight; see `forward`."""

    _name = "rms_norm"
