"""apex.multi_tensor_apply: not available, which scripts ask before they use it."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """apex's fused kernels over lists of tensors; torch has `torch._foreach_*` for its own."""

    available = False
    warned = True

    def __init__(self, chunk_size: int = 2048 * 32) -> None:
        self.chunk_size = chunk_size

    def __call__(self, *args: Any) -> NoReturn:
        """Raises `RuntimeError`: look at `available` first."""
        raise RuntimeError(
            "multi_tensor_applier is not available (multi_tensor_applier.available is False): "
            "apex's kernels are not part of ampatch. Use torch.optim's fused=True or foreach=True, "
            "and torch.nn.utils.clip_grad_norm_."
        )


multi_tensor_applier = MultiTensorApply()
