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
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Any,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """`torch.nn.functional.layer_norm`."""
    return F.layer_norm(input, _shape(normalized_shape), weight, bias, eps)


def fused_rms_norm(input: Tensor, normalized_shape: Any, eps: float = 1e-6) -> Tensor:
    """`torch.nn.functional.rms_norm` without weights."""
    return F.rms_norm(input, _shape(normalized_shape), eps=eps)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Any,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """`torch.nn.functional.rms_norm`."""
    return F.rms_norm(input, _shape(normalized_shape), weight, eps)


def _shape(normalized_shape: Any) -> list[int]:
    return [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)


class FusedLayerNormAffineFunction:
    """Has `apply` but is no autograd Function: torch's layer norm has a backward of its own."""

    apply = staticmethod(fused_layer_norm_affine)


class FusedLayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`.  `memory_efficient` is accepted and changes nothing."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient


class FusedRMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm`.  `memory_efficient` is accepted and changes nothing."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient


class MixedFusedLayerNorm(FusedLayerNorm):
    """A layer norm whose input may have another dtype; the output has the weight's."""

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(normalized_shape, eps=eps, **_affine_only(kwargs))

    def forward(self, input: Tensor) -> Tensor:
        """Computed in FP32."""
        weight, bias = self.weight.float(), self.bias.float()
        output = F.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps)
        return output.to(self.weight.dtype)


class MixedFusedRMSNorm(FusedRMSNorm):
    """An RMS norm whose input may have another dtype; the output has the weight's."""

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(normalized_shape, eps=eps, **_affine_only(kwargs))

    def forward(self, x: Tensor) -> Tensor:
        """Computed in FP32."""
        output = F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps)
        return output.to(self.weight.dtype)


def _affine_only(kwargs: dict[str, Any]) -> dict[str, Any]:
    if not kwargs.pop("elementwise_affine", True):
        raise RuntimeError(
            "the Mixed norms have weights: elementwise_affine=False is not possible. Use "
            "FusedLayerNorm or FusedRMSNorm."
        )
    return kwargs
