"""Half copies of FP32 weights: how they are made, and which weights a forward casts together.

`cast_weights` makes them.  One autograd node casts many weights, with one batched copy in the
forward and one in the backward.  Gradients reach `weight.grad` in FP32 through the weights' own
gradient accumulators, as from any other cast, so that hooks, DDP, retained graphs and double
backward see what they see in FP32 training.  A script may ask for the gradients of single weights
(`torch.autograd.grad`).  Then autograd runs the backward of all layers whose weights share a node
with them, so from the next forward on each weight has a node of its own.

Weights are cast in buckets of bounded size (the idea is from DDP's buckets, arXiv
2006.15704), as a forward begins: at O2 all weights, at O1 the weights that the last forward used
(`weight_cache.WeightUsage`).  Autograd runs the newest of the ready nodes first.  The nodes of
the casts are older than the forward's nodes, so they would run at the very end of the pass, and all
half gradients would stay in memory until then.  So they get a high sequence number, and each runs
as soon as its gradients are complete (`torch_private/probes`).

If an output of a node is not used, the hooks of its weight are called with None.  So a weight that
has hooks, or is in a module with backward hooks, has a node of its own.  In eval mode, weights
never share a node, because pruning libraries read the graph to find the weights of each layer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from .. import native
from ..torch_private import foreach
from ..torch_private.devices import device_and_stream, has_foreach_copy_kernel
from ..torch_private.modules import (
    GLOBAL_BACKWARD_HOOK_DICTS,
    HAS_BACKWARD_HOOK_DICTS,
    backward_hook_dicts,
    span_of,
)
from ..torch_private.probes import (
    is_batched,
    is_distributed,
    is_traced_or_transformed,
    keep_torch_methods,
    prioritize_node_of,
    running_ddp,
)
from ..torch_private.tensors import TENSOR_HOOKS_CAN_BE_SEEN, hooks_of

MAX_BUCKET_WEIGHTS = 32
MAX_BUCKET_BYTES = 8 * 2**20
MAX_BUCKET_BYTES_FOREACH = 32 * 2**20
"""The limits of a bucket, in weights and in bytes of FP32 weights.

The larger limit is for devices with a foreach copy kernel: fewer buckets are fewer kernels.  It is
about the size of DDP's buckets, so gradients are delayed no longer than in DDP.
"""

HOOKS_CAN_BE_SEEN = TENSOR_HOOKS_CAN_BE_SEEN and HAS_BACKWARD_HOOK_DICTS
"""If False, no weights share an autograd node."""

_layout_of = operator.attrgetter("layout")
_wants_grad = operator.attrgetter("requires_grad")


# Making copies


def cast_weights(
    weights: list[Tensor],
    dtype: torch.dtype,
    *,
    own_nodes: bool = False,
    in_one_storage: bool = False,
) -> Sequence[Tensor]:
    """Return copies of FP32 `weights` in `dtype`; gradients reach the weights.

    By default, one autograd node makes all copies; it accepts sparse gradients.  With `own_nodes`,
    each copy has its own node, and a weight may be a DTensor or another subclass.  With
    `in_one_storage`, for an RNN's flattened weights (`are_flat_weights`), the copies share storage.

    Under `no_grad` there is no graph, but the copies require a gradient if their weights do.  Only
    then does `F.linear` compute the batch of a non-contiguous input as one product.  Else it copies
    the weight for each sample (15 ms instead of 1 ms).
    """
    if in_one_storage:
        return _cast_weights_in_python(weights, dtype, False, _new_copies_in_one_storage)
    if len(weights) == 1:
        return _cast_weights_in_python(weights, dtype, own_nodes)
    return _cast_several(weights, dtype, own_nodes)


def _new_copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return new tensors with these values in `dtype`, copied in one batch, outside the graph."""
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    foreach.copy_(copies, list(tensors))
    return copies


def _new_copies_in_one_storage(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Like `_new_copies`, but all copies share one storage, laid out like the tensors' storage."""
    first = tensors[0]
    begin, end = span_of(tensors)
    storage = torch.empty(end - begin, dtype=dtype, device=first.device).untyped_storage()
    copies = [  # not views of one tensor: views share a version counter
        first.new_empty(0, dtype=dtype).set_(
            storage, tensor.storage_offset() - begin, tensor.size(), tensor.stride()
        )
        for tensor in tensors
    ]
    foreach.copy_(copies, list(tensors))
    return copies


class _CastTogether(Function):
    """Casts FP32 weights to half copies in one node.  A missing gradient stays None."""

    @staticmethod
    def forward(
        ctx: Any, make_copies: Callable[..., list[Tensor]], dtype: torch.dtype, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(make_copies(weights, dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [grad for grad in grads if grad is not None]
        can_be_one_batch = (
            set(map(_layout_of, present)) == {torch.strided}
            and not torch.is_grad_enabled()  # create_graph needs a cast of each gradient
            and not is_traced_or_transformed()
            and not any(map(is_batched, present))
        )
        if can_be_one_batch:
            widened = iter(_new_copies(present, torch.float32))
        else:
            widened = map(Tensor.float, present)
        return None, None, *[None if grad is None else next(widened) for grad in grads]


keep_torch_methods(_CastTogether)  # ampatch's patches are for the script's Functions only
_apply_without_checks = super(Function, _CastTogether).apply
"""`Function.apply` without its checks for torch.func transforms.

It is never called inside a transform.
"""


def _cast_weights_in_python(
    weights: list[Tensor],
    dtype: torch.dtype,
    own_nodes: bool,
    make_copies: Callable[..., list[Tensor]] = _new_copies,
) -> Sequence[Tensor]:
    """In C++: `cast_weights` of `weights.h`."""
    is_enabled = torch.is_grad_enabled()
    in_graph = is_enabled and any(map(_wants_grad, weights))
    casts_one_by_one = own_nodes if in_graph else len(weights) == 1
    copies: Sequence[Tensor]
    if casts_one_by_one:
        copies = [weight.to(dtype) for weight in weights]
    elif in_graph:
        copies = _apply_without_checks(make_copies, dtype, *weights)
    else:
        copies = make_copies(weights, dtype)
    if in_graph:
        for copy in copies if own_nodes else copies[:1]:
            prioritize_node_of(copy)
    elif not is_enabled:
        for weight, copy in zip(weights, copies, strict=True):
            copy.requires_grad = weight.requires_grad
    return copies


# Which weights are cast together


class Buckets:
    """The `weights` of `root` (`model` or a submodule of it), in their order, in buckets.

    All weights of a bucket are on one device.
    """

    def __init__(self, weights: Iterable[Tensor], root: nn.Module, model: nn.Module) -> None:
        self._root = root
        self._model = model
        self._hook_dicts = [*GLOBAL_BACKWARD_HOOK_DICTS]
        for module in root.modules():
            self._hook_dicts += backward_hook_dicts(module)
        self.lists: list[list[Tensor]] = []
        open_bucket_of: dict[Any, list[Tensor]] = {}
        for weight in weights:
            key = device_and_stream(weight)
            bucket = open_bucket_of.get(key)
            if bucket is None or not _has_room(bucket, weight):
                bucket = open_bucket_of[key] = []
                self.lists.append(bucket)
            bucket.append(weight)

    def lists_to_cast(self) -> list[list[Tensor]]:
        """Return the lists of weights to cast as a forward begins, one `cast_weights` each.

        In a list all weights require a gradient, or none does.  No list has a weight that needs a
        node of its own.
        """
        if not torch.is_grad_enabled():  # without a graph no hook runs
            return self.lists
        may_share = (
            HOOKS_CAN_BE_SEEN and self._model.training and ranks_allow_shared_nodes(self._model)
        )
        hooked = ids_under_backward_hooks(self._root) if may_share and any(self._hook_dicts) else ()
        lists = []
        for bucket in self.lists:
            if may_share and not hooked and all_may_share_node(bucket[0], bucket):
                lists.append(bucket)
                continue
            frozen = [weight for weight in bucket if not weight.requires_grad]
            sharing = [
                weight
                for weight in bucket
                if may_share
                and weight.requires_grad
                and may_share_node(weight)
                and id(weight) not in hooked
            ]
            lists += filter(None, (frozen, sharing))
        return lists


def _has_room(bucket: list[Tensor], weight: Tensor) -> bool:
    elements = sum(other.numel() for other in bucket) + weight.numel()
    max_bytes = (
        MAX_BUCKET_BYTES_FOREACH if has_foreach_copy_kernel(weight.device) else MAX_BUCKET_BYTES
    )
    return len(bucket) < MAX_BUCKET_WEIGHTS and elements * weight.element_size() <= max_bytes


def all_may_share_node(weight: Tensor, bucket: list[Tensor]) -> bool:
    """Whether all weights of `bucket` may be cast in one node; `weight` is one of them.

    In C++: `all_may_share_node` of `weights.h`.
    """
    require_grad = map(_wants_grad, bucket)
    return (
        may_share_node(weight)
        and all(require_grad if weight.requires_grad else map(operator.not_, require_grad))
        and not any(map(any, map(hooks_of, bucket)))
    )


def may_share_node(weight: Tensor) -> bool:
    """Whether `weight` may now be cast in one node with other weights."""
    return (
        type(weight) is Parameter
        and weight.dtype is torch.float32
        and weight.is_leaf
        and weight.layout is torch.strided
        and not any(hooks_of(weight))
    )


def are_partly_wanted(weights: Iterable[Tensor], wanted: Collection[int]) -> bool:
    """Whether some of the weights that require a gradient are `wanted` (ids), and some are not."""
    are_wanted = {id(weight) in wanted for weight in weights if weight.requires_grad}
    return len(are_wanted) == 2


def ids_under_backward_hooks(root: nn.Module) -> set[int]:
    """Ids of the weights of modules that have backward hooks, and of their submodules.

    Such a hook runs when the gradients of its module are complete.  With a shared node, it would
    run later, when the gradients of the whole bucket are complete.
    """
    hooks_all = any(GLOBAL_BACKWARD_HOOK_DICTS)
    return {
        id(weight)
        for module in root.modules()
        if hooks_all or any(backward_hook_dicts(module))
        for weight in module.parameters()
    }


def ranks_allow_shared_nodes(model: nn.Module) -> bool:
    """Whether the weights of a bucket may share a node.

    A shared node makes autograd count all weights of a bucket as used if the forward uses one.
    False under DDP with `find_unused_parameters=True`, and with `torch.distributed` but without
    DDP.
    """
    if not is_distributed():
        return True
    ddp = model if isinstance(model, DistributedDataParallel) else running_ddp()
    return ddp is not None and not ddp.find_unused_parameters


_cast_several = _cast_weights_in_python
if native.part is not None:
    _cast_several, all_may_share_node = native.part.cast_weights, native.part.all_may_share_node
