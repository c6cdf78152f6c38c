"""apex.normalization: torch's own layers under apex's names and arguments."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]


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
