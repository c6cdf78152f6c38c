"""Half copies of many weights made by one node of the graph.

`cast_together` is the node: FP32 weights in, their half copies out, one batched copy
each way.  Gradients reach `weight.grad` in FP32 through the weights' own gradient
accumulators, as from any other cast, so that hooks, DDP, retained graphs and double backward
see what they see in FP32 training.  Who asks for gradients of single weights would go through
all layers behind the node: then each weight has a node of its own (`cast_apart`).

Casts are made in buckets of bounded size (the idea is that of DDP's buckets, arXiv
2006.15704), as a forward begins: at O2 of all weights that are lent, at O1 of those that the
last forward cast (`LastForward`).  The nodes get a high sequence number, with which autograd
runs each as soon as its gradients are there (`torch_private/nodes`).

A node with an unused output calls the hooks of that weight with None.  So a weight that has
hooks, or lies in a module with backward hooks, is left out.  In evaluation mode where a graph
is recorded none are cast together.
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
from ..torch_private.devices import copies_lists_at_once, place_of
from ..torch_private.modules import (
    BACKWARD_HOOKS_CAN_BE_SEEN,
    GLOBAL_BACKWARD_TABLES,
    backward_tables,
    span_of,
)
from ..torch_private.probes import (
    are_ranks,
    is_batched,
    is_recording,
    keep_plain,
    run_when_ready,
    running_ddp,
)
from ..torch_private.tensors import (
    TENSOR_HOOKS_CAN_BE_SEEN,
    hooks_of,
)

MOST_WEIGHTS = 32
MOST_BYTES = 8 * 2**20
MOST_BYTES_OF_LISTS = 32 * 2**20
"""A bucket's limits; the bytes are those of its FP32 weights.

The larger one is for devices that copy a list in one kernel: the fewer buckets, the fewer kernels.
It is about that of DDP's buckets, so gradients wait no longer here than there.
"""

HOOKS_CAN_BE_SEEN = TENSOR_HOOKS_CAN_BE_SEEN and BACKWARD_HOOKS_CAN_BE_SEEN
"""If False, no weights are cast together."""

Copies = dict[int, tuple[Tensor, int]]
"""Half copies, each with the version of its weight, by the weight's id."""


class _CastTogether(Function):
    """FP32 weights in, half copies out; a missing gradient is passed on as None."""

    @staticmethod
    def forward(
        ctx: Any, make: Callable[..., list[Tensor]], dtype: torch.dtype, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(make(weights, dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [grad for grad in grads if grad is not None]
        if (  # one call may write them all
            set(map(_layout_of, given)) == {torch.strided}
            and not torch.is_grad_enabled()  # no create_graph: a second derivative finds its way
            and not is_recording()
            and not any(map(is_batched, given))
        ):
            made = iter(copies(given, torch.float32))
        else:
            made = map(Tensor.float, given)
        return None, None, *[None if grad is None else next(made) for grad in grads]


keep_plain(_CastTogether)  # ampatch's own patches are for the script's Functions
_apply = super(Function, _CastTogether).apply
"""`Function.apply` without its checks for torch.func, in whose transforms it is not used."""


def copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """New tensors with these values in `dtype`, written in one batch, outside the graph."""
    made = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    foreach.copy_(made, list(tensors))
    return made


def _in_one_block(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """As `copies`, for tensors in one block of memory (`are_one_block`): so are the copies, at the
    same positions behind the first one.
    """
    first, (begin, end) = tensors[0], span_of(tensors)
    block = torch.empty(end - begin, dtype=dtype, device=first.device).untyped_storage()
    made = [  # no views of one tensor: each is to have a version of its own
        first.new_empty(0, dtype=dtype).set_(
            block, tensor.storage_offset() - begin, tensor.size(), tensor.stride()
        )
        for tensor in tensors
    ]
    foreach.copy_(made, list(tensors))
    return made


def cast_in_one_block(weights: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Copies of an RNN's weights, which share one block of memory; a call uses all or none."""
    if torch.is_grad_enabled() and any(map(_wants_grad, weights)):
        return _apply(_in_one_block, dtype, *weights)
    with torch.no_grad():
        return _in_one_block(weights, dtype)


def cast_in_graph(weights: list[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """The copies of FP32 `weights` in `dtype`, by one node; gradients may be sparse.

    In C++: `cast_together` of `weights.h`.
    """
    return _apply(copies, dtype, *weights)


def cast_apart(weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """As `cast_in_graph`, by a node for each weight, which runs as soon as it is ready.

    In C++: `cast_apart` of `weights.h`.
    """
    halves = [weight.to(dtype) for weight in weights]
    for half in halves:
        run_when_ready(half)
    return halves


def _outside_graph(weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies without a graph; those made under `no_grad` require a gradient if their weights do.

    torch asks for that, though no graph is recorded: `F.linear` on an input that is not contiguous
    folds its batch into one product only if the weight requires one, else it copies the weight for
    each sample (15 ms where 1 ms would do).

    In C++: `copies` of `weights.h`.
    """
    if torch.is_grad_enabled():
        with torch.no_grad():
            return copies(weights, dtype)
    made = copies(weights, dtype)
    for weight, copy in zip(weights, made, strict=True):
        copy.requires_grad = weight.requires_grad
    return made


def cast_together(weights: list[Tensor], dtype: torch.dtype, in_graph: bool) -> Sequence[Tensor]:
    """The copies of FP32 `weights` in `dtype`; `in_graph`: by one node that leads back to them."""
    if len(weights) == 1:
        made = weights[0].to(dtype)
        if not torch.is_grad_enabled():
            made.requires_grad = weights[0].requires_grad
        return [made]
    return cast_in_graph(weights, dtype) if in_graph else _outside_graph(weights, dtype)


def cast_into(known: Copies, weights: list[Tensor], dtype: torch.dtype, in_graph: bool) -> None:
    """`cast_together`; each copy is entered in `known`, with the version that it was made from.

    Under `no_grad` all copies require a gradient, since only torch's functions get them: see
    `_outside_graph`.

    In C++: `cast_into` of `weights.h`.
    """
    versions = list(map(_version_of, weights))  # before: another thread may write meanwhile
    halves = cast_together(weights, dtype, in_graph)
    if not torch.is_grad_enabled():
        for half in halves:
            half.requires_grad = True
    known.update(zip(map(id, weights), zip(halves, versions)))


def are_alike(weight: Tensor, bucket: list[Tensor]) -> bool:
    """Whether the weights of `bucket` may be cast in one node with `weight`, which is in it.

    In C++: `are_alike` of `weights.h`.
    """
    wanting = map(_wants_grad, bucket)
    return (
        may_share_node(weight)
        and all(wanting if weight.requires_grad else map(operator.not_, wanting))
        and not any(map(any, map(hooks_of, bucket)))
    )


if native.part is not None:
    cast_in_graph, _outside_graph = native.part.cast_together, native.part.copies
    cast_into, are_alike = native.part.cast_into, native.part.are_alike
    cast_apart = native.part.cast_apart


def alike(bucket: list[Tensor], alone: Collection[int] = ()) -> list[list[Tensor]]:
    """The weights of a bucket that may go in one node, and those that want no gradient.

    Left out are those in `alone` (ids), and those with hooks.
    """
    if not alone and are_alike(bucket[0], bucket):
        return [bucket]
    frozen = [one for one in bucket if not one.requires_grad]
    wanting = [
        one for one in bucket if one.requires_grad and may_share_node(one) and id(one) not in alone
    ]
    return [part for part in (frozen, wanting) if part]


class LastForward:
    """The weights that a model's last forward cast to `dtype`: what its next one begins with.

    A weight that has got another dtype or device since is among them: nothing uses its copy.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._model = model
        # Exchanged as a whole, since several threads may be in forwards of the model.
        self._found: tuple[list[int], list[list[Tensor]], list[dict]] = ([], [], [])
        self._ids: set[int] = set()  # of all weights that its forwards have cast
        self.wants_own_nodes = False  # one for each weight
        self.has_own_nodes = False  # its last forward made them

    def note(self, used: dict[int, Tensor]) -> None:
        """A forward has ended that used copies of these weights (by id), in this order."""
        ids = list(used)
        if ids != self._found[0]:
            buckets = divide(filter(may_share_node, used.values()))
            self._found = ids, buckets, hook_tables(list(self._model.modules()))
            self._ids = self._ids.union(ids)

    def note_request(self, wanted: Collection[int]) -> bool:
        """Gradients of these weights (ids) are asked for: of some, and not of all that it casts?

        Then each has a node of its own from the next forward on.  Returns whether graphs that are
        there may have nodes in common for them and others.
        """
        if self.has_own_nodes or self._ids.isdisjoint(wanted):
            return False
        used = [one for one in self._model.parameters() if id(one) in self._ids]
        is_split = are_split(used, wanted)
        self.wants_own_nodes |= is_split
        return is_split

    def buckets(self) -> list[list[Tensor]]:
        """What to cast together as a forward begins; the rest is cast at its use.

        Nothing in evaluation mode where a graph is recorded: libraries that prune record one to
        find the weights behind each layer.
        """
        _, buckets, tables = self._found
        if not buckets or not HOOKS_CAN_BE_SEEN:
            return []
        if not torch.is_grad_enabled():  # no graph: no hooks to respect
            return buckets
        if not self._model.training or not may_use_all(self._model):
            return []
        alone = below_hooks(list(self._model.modules())) if any(tables) else ()
        return [part for bucket in buckets for part in alike(bucket, alone)]


_layout_of = operator.attrgetter("layout")
_wants_grad = operator.attrgetter("requires_grad")
_version_of = operator.attrgetter("_version")


def may_share_node(weight: Tensor) -> bool:
    """Whether a weight, as it is, may be cast together with others."""
    return (
        type(weight) is Parameter
        and weight.dtype is torch.float32
        and weight.is_leaf
        and weight.layout is torch.strided
        and not any(hooks_of(weight))
    )


def are_split(weights: Iterable[Tensor], wanted: Collection[int]) -> bool:
    """Whether gradients of some of these weights are wanted (ids), and not of all that can be."""
    asked = {id(weight) in wanted for weight in weights if weight.requires_grad}
    return len(asked) == 2


def divide(weights: Iterable[Tensor]) -> list[list[Tensor]]:
    """Weights in buckets, in their order; those of a bucket live on one device."""
    buckets: list[list[Tensor]] = []
    latest: dict[Any, list[Tensor]] = {}
    for weight in weights:
        home = place_of(weight)
        bucket = latest.get(home)
        if bucket is None or not _has_room(bucket, weight):
            bucket = latest[home] = []
            buckets.append(bucket)
        bucket.append(weight)
    return buckets


def _has_room(bucket: list[Tensor], weight: Tensor) -> bool:
    size = sum(one.numel() for one in bucket) + weight.numel()
    most = MOST_BYTES_OF_LISTS if copies_lists_at_once(weight.device) else MOST_BYTES
    return len(bucket) < MOST_WEIGHTS and size * weight.element_size() <= most


def hook_tables(parts: list[nn.Module]) -> list[dict]:
    """The tables of backward hooks of these modules, and of all modules."""
    return [*GLOBAL_BACKWARD_TABLES, *(table for one in parts for table in backward_tables(one))]


def below_hooks(parts: list[nn.Module]) -> set[int]:
    """Ids of the weights of modules with backward hooks, their children's among them.

    Such a hook runs when the gradients of its module are complete; those of a bucket may not be.
    """
    if any(GLOBAL_BACKWARD_TABLES):
        hooked = parts
    else:
        hooked = [one for one in parts if any(backward_tables(one))]
    return {id(weight) for module in hooked for weight in module.parameters()}


def may_use_all(model: nn.Module) -> bool:
    """Whether all weights of a bucket may count as used when one of them is.

    Not under DDP that looks for unused weights, nor where ranks communicate without DDP.
    """
    if not are_ranks():
        return True
    ddp = model if isinstance(model, DistributedDataParallel) else running_ddp()
    return ddp is not None and not ddp.find_unused_parameters
