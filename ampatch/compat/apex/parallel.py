"""apex.parallel: torch's DistributedDataParallel and SyncBatchNorm under apex's names."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

__all__ = ["DistributedDataParallel", "SyncBatchNorm", "convert_syncbn_model"]

logger = logging.getLogger("ampatch")


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's, with apex's arguments.

    `delay_allreduce=True`, which apex's users gave for parameters that not every
    step uses, becomes `find_unused_parameters`.  Arguments that tuned apex's
    communication are accepted and change nothing (`allreduce_always_fp32` and
    `gradient_predivide_factor` are logged).  Raises `ValueError` for
    `gradient_average=False`, which would change the gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        if shared_param is not None:
            raise ValueError(
                "apex.parallel.DistributedDataParallel(shared_param=...): not an option any more; "
                "pass delay_allreduce=True for parameters shared between modules."
            )
        if not gradient_average:
            raise ValueError(
                "apex.parallel.DistributedDataParallel(gradient_average=False): torch's averages "
                "gradients over the ranks. Multiply the loss by the number of ranks instead."
            )
        if allreduce_always_fp32 or gradient_predivide_factor != 1.0:
            logger.info(
                "apex.parallel.DistributedDataParallel: allreduce_always_fp32 and "
                "gradient_predivide_factor are left to torch's DistributedDataParallel."
            )
        super().__init__(module, find_unused_parameters=bool(delay_allreduce))


class SyncBatchNorm(nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm`; `fuse_relu` applies a ReLU to the output."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)
        if channel_last:
            raise ValueError(
                "apex.parallel.SyncBatchNorm(channel_last=True): not provided. Keep the shape "
                "(N, C, ...) and use tensor.to(memory_format=torch.channels_last)."
            )
        self.fuse_relu = fuse_relu

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalized over the ranks of the process group."""
        output = super().forward(input)
        return torch.relu(output) if self.fuse_relu else output


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """The model with `torch.nn.SyncBatchNorm` in the place of every BatchNorm."""
    if channel_last:
        raise ValueError(
            "convert_syncbn_model(channel_last=True): not provided. Keep the shape (N, C, ...) and "
            "use tensor.to(memory_format=torch.channels_last)."
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
