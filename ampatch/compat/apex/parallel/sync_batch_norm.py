"""SyncBatchNorm: torch's, with an implementation of our own on the CPU, where torch has none."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampatch.torch_private.modules import BATCH_NORMS, INSTANCE_NORMS, SYNC_BATCH_NORM_CHECKS

__all__ = ["SyncBatchNorm", "convert_syncbn_model"]


class SyncBatchNorm(BATCH_NORMS[0]):
    """`torch.nn.SyncBatchNorm` that also works on the CPU.

    It is not a subclass, as in apex, because DistributedDataParallel refuses `nn.SyncBatchNorm` in
    models on the CPU.

    With `channel_last` the channels are the last dimension of the input.  With `fuse_relu` the
    output goes through a ReLU.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1,
        affine: bool = True, track_running_stats: bool = True, process_group: Any = None,
        channel_last: bool = False, fuse_relu: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize over the ranks of the process group; add `z` before the ReLU."""
        channels_first = input.movedim(-1, 1) if self.channel_last else input
        if channels_first.is_cpu and self._uses_ranks():
            output = self._normalized(channels_first)
        else:
            output = nn.SyncBatchNorm.forward(self, channels_first)
        if self.channel_last:
            output = output.movedim(1, -1)
        if z is not None:
            output = output + z
        return torch.relu(output) if self.fuse_relu else output

    def _uses_ranks(self) -> bool:
        return self.training and dist.is_available() and dist.is_initialized()

    def _normalized(self, input: Tensor) -> Tensor:
        """Normalize in float64, which is never cast; the output has the dtype of the input."""
        from torch.distributed.nn.functional import all_reduce  # which imports much

        values, dims = input.double(), [0, *range(2, input.dim())]
        count = values.new_tensor([input.numel() / input.size(1)])
        local = torch.cat([values.sum(dims), values.square().sum(dims), count])
        group = self.process_group or dist.group.WORLD
        total = all_reduce(local, group=group)
        sums, squares, count = total.split([self.num_features, self.num_features, 1])
        mean = sums / count
        variance = squares / count - mean.square()
        self._update_statistics(mean, variance * count / (count - 1))
        shape = [1, -1, *[1] * (input.dim() - 2)]
        output = (values - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            output = output * self.weight.double().view(shape) + self.bias.double().view(shape)
        return output.to(input.dtype)

    @torch.no_grad()
    def _update_statistics(self, mean: Tensor, variance: Tensor) -> None:
        if not self.track_running_stats:
            return
        self.num_batches_tracked.add_(1)
        weight = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(variance.to(self.running_var.dtype), weight)


for _name, _check in SYNC_BATCH_NORM_CHECKS.items():
    setattr(SyncBatchNorm, _name, _check)


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """Replace every BatchNorm of a model by a `SyncBatchNorm` with the same parameters.

    Submodules are replaced in place.  Returns `module`, or its replacement if it is a BatchNorm.
    """
    converted = module
    if isinstance(module, BATCH_NORMS) and not isinstance(module, INSTANCE_NORMS):
        converted = SyncBatchNorm(
            *(module.num_features, module.eps, module.momentum, module.affine),
            *(module.track_running_stats, process_group, channel_last),
        )
        converted._parameters.update(module._parameters)
        converted._buffers.update(module._buffers)
        converted.train(module.training)
    for name, child in module.named_children():
        converted.add_module(name, convert_syncbn_model(child, process_group, channel_last))
    return converted
