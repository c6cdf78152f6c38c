"""What autocast for CUDA makes of a call, asked without a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from op_calls import Raised, Sample, outcome
from torch import Tensor
from torch._subclasses import FakeTensorMode, fake_tensor


def under_autocast(call: Callable, sample: Sample, half: torch.dtype) -> list | Raised:
    """What autocast for CUDA makes of the call: fake tensors, which have dtypes but no values."""
    with cuda_autocast(half):
        return on_fake_cuda(call, sample)


def on_fake_cuda(call: Callable, sample: Sample) -> list | Raised:
    """The call on fake tensors that claim to be on CUDA."""

    def fake(leaf: Tensor) -> Tensor:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="cuda")

    with FakeTensorMode(), fake_errors_unlogged():
        return outcome(call, sample.fresh(fake))


@contextmanager
def fake_errors_unlogged() -> Iterator[None]:
    """FakeTensorMode logs a traceback with each refusal that it also raises."""
    logger = logging.getLogger(fake_tensor.__name__)
    found, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = found


@contextmanager
def cuda_autocast(half: torch.dtype) -> Iterator[None]:
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", half)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
        torch.clear_autocast_cache()
