"""DistributedDataParallel and Reducer."""

# No `from __future__ import annotations`: torch compares the annotations of a communication hook.

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..amp_c import flatten, unflatten

__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "create_syncbn_process_group",
    "flat_dist_call",
    "flatten",
    "unflatten",
]

_MESSAGE_SIZE = 10_000_000  # elements; apex's default

_OPTIONS = inspect.signature(nn.parallel.DistributedDataParallel).parameters
_BROADCAST_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"
)
"""torch's option to broadcast buffers in each forward.  Newer torch warns about the older name."""


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """`torch.nn.parallel.DistributedDataParallel` with apex's arguments.

    A forward does not broadcast buffers: each rank keeps its own statistics of batch norms, and one
    rank may validate while the others wait.

    Args:
        module: the model, on its device.
        message_size: elements in a bucket; by default torch's own choice.
        delay_allreduce: allow parameters that a step does not use (`find_unused_parameters`).
        gradient_average: divide the sum of gradients by the number of ranks.
        gradient_predivide_factor: without `gradient_average` the sum is divided by this.
        allreduce_always_fp32: accepted; gradients are FP32 at O0 to O2.
        allreduce_trigger_params, retain_allreduce_buffers, num_allreduce_streams,
            allreduce_communicators, gradient_average_split_factor, prof: accepted; they tuned
            apex's own communication and change nothing.

    Raises `ValueError` for `shared_param`, as apex did.
    """

    def __init__(
        self, module: nn.Module, message_size: int = _MESSAGE_SIZE, delay_allreduce: bool = False,
        shared_param: bool | None = None, allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False, allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1, allreduce_communicators: Any = None,
        gradient_average: bool = True, gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None, prof: bool = False,
    ) -> None:  # fmt: skip
        if shared_param is not None:
            raise ValueError(
                "apex.parallel.DistributedDataParallel(shared_param=...): not an option any more; "
                "pass delay_allreduce=True for parameters shared between modules."
            )
        options = {"find_unused_parameters": bool(delay_allreduce), _BROADCAST_BUFFERS: False}
        if message_size != _MESSAGE_SIZE:
            options["bucket_cap_mb"] = max(1, message_size * 4 // 2**20)
        super().__init__(module, **options)
        if not gradient_average:
            self.register_comm_hook((self.process_group, gradient_predivide_factor), _sum_gradients)

    def enable_allreduce(self) -> None:
        """Reduce gradients in backward again."""
        self.require_backward_grad_sync = True

    def disable_allreduce(self) -> None:
        """Do not average gradients until `enable_allreduce`."""
        self.require_backward_grad_sync = False


def _sum_gradients(
    state: tuple[Any, float], bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    group, divisor = state
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].div_(divisor))


class Reducer:
    """Averages gradients over the ranks when `reduce()` is called.

    `module_or_grads_list` is a module, whose parameters are broadcast from rank 0 at once,
    or a list of tensors to average.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Tensor]) -> None:
        is_module = isinstance(module_or_grads_list, nn.Module)
        self.module: Any = module_or_grads_list if is_module else None
        self.grads: list[Tensor] = [] if is_module else list(module_or_grads_list)
        for param in self.module.parameters() if is_module else ():
            dist.broadcast(param.data, 0)

    def reduce(self) -> None:
        """Average in place.  Every rank must have gradients for the same tensors."""
        grads = self.grads
        if self.module is not None:
            grads = [param.grad for param in self.module.parameters() if param.grad is not None]
        flat_dist_call(grads, dist.all_reduce)


def flat_dist_call(
    tensors: Iterable[Tensor], call: Callable, extra_args: Iterable[Any] | None = None
) -> None:
    """Run the collective `call(flat, *extra_args)` once for all tensors of a dtype, in place.

    `torch.distributed.all_reduce` averages them.
    """
    by_type: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.type(), []).append(tensor)
    for same_type in by_type.values():
        with torch.no_grad():
            flat = flatten(same_type)
            call(flat, *(extra_args or ()))
            if call is dist.all_reduce:
                flat /= dist.get_world_size()
            for tensor, values in zip(same_type, unflatten(flat, same_type)):
                tensor.copy_(values)


def create_syncbn_process_group(group_size: int) -> Any:
    """The group of this rank and its `group_size - 1` neighbours, or None for all ranks (0).

    Every rank must call it.  Raises `ValueError` if `group_size` does not divide the ranks.
    """
    ranks = dist.get_world_size()
    if group_size == 0:
        return None
    if not 0 < group_size <= ranks or ranks % group_size:
        raise ValueError(
            f"create_syncbn_process_group(group_size={group_size}): expected 0, or a number "
            f"that divides the number of ranks ({ranks})."
        )
    return dist.new_subgroups(group_size)[0]
