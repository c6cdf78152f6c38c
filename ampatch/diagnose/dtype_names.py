"""Dtypes as users write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def dtype_name(dtype: torch.dtype) -> str:
    """`"float16"` for `torch.float16`."""
    return str(dtype).removeprefix("torch.")
