"""Every listed function, called as its row says, against PyTorch's own autocast for CUDA.

The oracle needs no GPU: inside a FakeTensorMode tensors may claim to be on
CUDA, and the dispatcher applies the real autocast policy to them.
"""

from __future__ import annotations

from collections import namedtuple
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_samples import sample
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

import ampatch
from ampatch.casting.install import resolve
from ampatch.casting.tables import BLACKLIST, PROMOTE, WHITELIST, Rule

PLACES = [
    (row.where, name, row.rule)
    for row in (*WHITELIST, *BLACKLIST, *PROMOTE)
    for name in row.names
    if not row.native
]
PLACE_IDS = [f"{where}.{name}" for where, name, _ in PLACES]
NO_CPU_KERNEL = {
    "cudnn_convolution", "cudnn_convolution_transpose", "_scaled_dot_product_flash_attention",
}
FLOATS = (Rule.FLOAT, Rule.FLOAT_UNLESS_DTYPE)


@pytest.fixture
def o1(half):
    """Casting in force for the whole process."""
    ampatch.initialize(opt_level="O1", dtype=half, verbosity=0)


def call(where: str, name: str, args: tuple, kwargs: dict) -> Any:
    return getattr(resolve(where), name)(*args, **kwargs)


def to(dtype: torch.dtype, tree: Any) -> Any:
    return tree_map(
        lambda leaf: (
            leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
        ),
        tree,
    )


def dtypes(tree: Any) -> list:
    return [leaf.dtype for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def cuda_autocast(dtype: torch.dtype):
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
        torch.clear_autocast_cache()


def on_fake_cuda(tree: Any) -> Any:
    return tree_map(
        lambda leaf: (
            torch.empty(leaf.shape, dtype=leaf.dtype, device="cuda")
            if isinstance(leaf, Tensor) else leaf
        ),
        tree,
    )
