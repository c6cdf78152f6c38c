"""Half copies of many weights made by one node of the graph.

`cast_together` is the node: FP32 weights in, their half copies out, one batched copy
each way.  Gradients reach `weight.grad` in FP32 through the weights' own gradient
accumulators, as from any other cast, so that hooks, DDP, `torch.autograd.grad`,
retained graphs and double backward see what they see in FP32 training.

`Plan` says which weights of a model go together: those that its forwards have used so
far, in the order of use, in buckets of bounded size (the idea is that of DDP's buckets,
arXiv 2006.15704).  A bucket is cast when the first of its weights is used.  So the backward
pass runs the node as soon as it has passed that use, and gradients do not arrive late or
wait in half.

A node with an unused output calls the hooks of that weight with None.  So a weight that
has hooks, lies in a module with backward hooks, or was not used by a forward or not reached
by a backward pass before, is left out.
In a forward whose graph gets hooks (`activation.register_hook`) none are cast together, nor in
evaluation mode where a graph is recorded.
"""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
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
)
from ..torch_private.probes import are_ranks, is_batched, is_recording, running_ddp
from ..torch_private.tensors import (
    TENSOR_HOOKS_CAN_BE_SEEN,
    backward_hooks_of,
    hooks_of,
    late_hooks_of,
)

MOST_WEIGHTS = 32
MOST_BYTES = 8 * 2**20
MOST_BYTES_OF_LISTS = 32 * 2**20
"""A bucket's limits; the bytes are those of its FP32 weights.

The larger one is for devices that copy a list in one kernel: the fewer buckets, the fewer kernels.
It is about that of DDP's buckets, so that gradients wait no longer for these than for those.
"""

HOOKS_CAN_BE_SEEN = TENSOR_HOOKS_CAN_BE_SEEN and BACKWARD_HOOKS_CAN_BE_SEEN
"""Without, no weights are cast together."""

MOST_CHANGES = 64
"""Of a plan.  A model that makes its weights anew again and again has them cast one by one."""


Copies = dict[int, tuple[Tensor, int]]
"""Half copies, each with the version of its weight, by the weight's id."""

_NO_PLAN = -1
_numbers = itertools.count()
_plans: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()
"""By their numbers, which nodes know: they live as long as their graph, not as long as a plan."""


def note_unreached(plan: int, ids: list[int]) -> None:
    """A backward pass did not reach these weights: the plan leaves them out from now on."""
    known = _plans.get(plan)
    if known is not None and ids:
        known.learn((), ids)


class _CastTogether(Function):
    """FP32 weights in, half copies out; a missing gradient is passed on as None.

    The plan of that number is told the weights of missing gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, make: Callable[..., list[Tensor]], dtype: torch.dtype, plan: int, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.keys = plan, list(map(id, weights))
        return tuple(make(weights, dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if (  # one call may write them all
            list(map(_layout_of, grads)).count(torch.strided) == len(grads)
            and not torch.is_grad_enabled()  # no create_graph: a second derivative finds its way
            and not is_recording()
            and not any(map(is_batched, grads))
        ):
            return None, None, None, *copies(grads, torch.float32)  # type: ignore[arg-type]
        note_unreached(ctx.plan, [key for key, grad in zip(ctx.keys, grads) if grad is None])
        return None, None, None, *[None if grad is None else grad.float() for grad in grads]


_apply = super(Function, _CastTogether).apply
"""`Function.apply` without its questions about torch.func: in its transforms it is not used."""


def _layout_of(grad: Tensor | None) -> torch.layout | None:
    return None if grad is None else grad.layout


def copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """New tensors with these values in `dtype`, written in one batch, outside the graph."""
    made = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    foreach.copy_(made, list(tensors))
    return made


def _in_one_block(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """As `copies`, of tensors in one block of memory: they share one too, at the same places."""
    first = tensors[0]
    size = first.untyped_storage().nbytes() // first.element_size()
    block = torch.empty(size, dtype=dtype, device=first.device).untyped_storage()
    made = [  # no views of one tensor: each is to have a version of its own
        first.new_empty(0, dtype=dtype).set_(
            block, tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        for tensor in tensors
    ]
    foreach.copy_(made, list(tensors))
    return made


def cast_in_one_block(weights: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """The copies of weights that share one block of memory; one call uses all or none."""
    if torch.is_grad_enabled() and any(map(_wants_grad, weights)):
        return _apply(_in_one_block, dtype, _NO_PLAN, *weights)
    with torch.no_grad():
        return _in_one_block(weights, dtype)


def _in_graph(weights: list[Tensor], dtype: torch.dtype, plan: int) -> Sequence[Tensor]:
    return _apply(copies, dtype, plan, *weights)


def _outside_graph(weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    if not torch.is_grad_enabled():
        return copies(weights, dtype)
    with torch.no_grad():
        return copies(weights, dtype)


def cast_in_graph(weights: list[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """The copies of FP32 `weights` in `dtype`, by one node; gradients may be sparse."""
    return _in_graph(weights, dtype, _NO_PLAN)


def cast_together(
    weights: list[Tensor], dtype: torch.dtype, in_graph: bool, plan: Plan | None = None
) -> Sequence[Tensor]:
    """The copies of FP32 `weights` in `dtype`; `in_graph`: with one node that leads back to them.

    `plan` is given the weights that a backward pass does not reach.
    """
    if len(weights) == 1:
        return [weights[0].to(dtype)]
    if in_graph:
        return _in_graph(weights, dtype, _NO_PLAN if plan is None else plan.number)
    return _outside_graph(weights, dtype)


def cast_into(
    known: Copies, weights: list[Tensor], dtype: torch.dtype, in_graph: bool, plan: Plan | None
) -> None:
    """`cast_together`; each copy is entered in `known`, with the version that it was made from."""
    if len(weights) == 1:
        [weight] = weights
        version = weight._version  # before the cast: another thread may write meanwhile
        known[id(weight)] = weight.to(dtype), version
    elif _cast_into is not None:
        _cast_into(known, weights, dtype, in_graph, _NO_PLAN if plan is None else plan.number)
    else:
        versions = list(map(_version_of, weights))
        halves = cast_together(weights, dtype, in_graph, plan)
        known.update(zip(map(id, weights), zip(halves, versions)))


class Plan:
    """Which weights of one model are cast together.

    `bucket_of` has a weight's bucket by the weight's id.  It is replaced as a whole, since
    several threads may be in forwards of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.number = next(_numbers)
        _plans[self.number] = self
        self._changing = threading.RLock()
        self._model = model
        self._order: dict[int, Tensor] = {}  # by id; held, so that an id stays a weight's own
        self._left_out: set[int] = set()  # ids of weights that a forward did not use
        self._hook_tables: list[dict] = []
        self._changes = 0
        self._has_hooks = False
        self.was_hooked = False  # the graph of the latest forward got hooks
        self.bucket_of: dict[int, list[Tensor]] = {}

    def begin(self) -> bool:
        """A forward of the model starts: whether weights may be cast together in it.

        Not in evaluation mode where a graph is recorded: who asks for one without a step, as
        libraries that prune, may look in it for the weights behind each layer.
        """
        if not HOOKS_CAN_BE_SEEN or not may_use_all(self._model):
            return False
        if not self._model.training and torch.is_grad_enabled():
            return False
        if self._has_hooks or any(self._hook_tables):
            with self._changing:
                self._divide()
        return True

    def learn(self, new: Iterable[Tensor], unused: Iterable[int]) -> None:
        """A forward or a backward pass has ended.  `new` are weights, in the order of use, that
        were cast by themselves; `unused` the ids of those that were cast with others and not used.
        """
        with self._changing:
            before = list(self._order)
            for key in unused:
                self._left_out.add(key)
                self._order.pop(key, None)
            for weight in new if self._changes < MOST_CHANGES else ():
                if id(weight) not in self._left_out:
                    self._order.setdefault(id(weight), weight)
            if list(self._order) != before:
                self._changes += 1
                self._divide()

    def _divide(self) -> None:
        """Divide the weights into buckets; drop those that have left the model."""
        parts = list(self._model.modules())
        own = {id(p) for module in parts for p in module._parameters.values() if p is not None}
        if self._changes == MOST_CHANGES:
            own = set()
        self._left_out.update(key for key in self._order if key not in own)
        self._order = {key: weight for key, weight in self._order.items() if key in own}
        self._hook_tables = hook_tables(parts)
        hooked = below_hooks(parts) if any(self._hook_tables) else set()
        self._has_hooks = bool(hooked)
        planned = [weight for key, weight in self._order.items() if key not in hooked]
        self.bucket_of = {id(one): bucket for bucket in divide(planned) for one in bucket}


def are_alike(weight: Tensor, bucket: list[Tensor]) -> bool:
    """Whether the weights of `bucket` may be cast in one node with `weight`, which is in it."""
    wanting = map(_wants_grad, bucket)
    return (
        may_be_planned(weight)
        and all(wanting if weight.requires_grad else map(operator.not_, wanting))
        and not any(map(backward_hooks_of, bucket))
        and not any(map(late_hooks_of, bucket))
    )


_cast_into: Callable[..., None] | None = None

if native.part is not None:
    _in_graph, _outside_graph = native.part.cast_together, native.part.copies
    _cast_into = native.part.cast_into
    are_alike = native.part.are_alike
    native.part.on_missing(note_unreached)


def alike(weight: Tensor, bucket: list[Tensor]) -> list[Tensor]:
    """The weights of a bucket that may be cast in one node with `weight`; none if it may not.

    A weight that has another dtype or device by now is not left out: its copy is not used.
    """
    if are_alike(weight, bucket):
        return bucket
    if not may_be_planned(weight):
        return []
    wanted = weight.requires_grad
    return [one for one in bucket if one.requires_grad is wanted and may_be_planned(one)]


_wants_grad = operator.attrgetter("requires_grad")
_version_of = operator.attrgetter("_version")


def may_be_planned(weight: Tensor) -> bool:
    """Whether a weight, as it is, may be cast together with others."""
    return (
        type(weight) is Parameter
        and weight.dtype is torch.float32
        and weight.is_leaf
        and weight.layout is torch.strided
        and not any(hooks_of(weight))
    )


def divide(weights: Iterable[Tensor]) -> list[list[Tensor]]:
    """Weights in buckets, in their order; those of a bucket live in the same place."""
    buckets: list[list[Tensor]] = []
    latest: dict[Any, list[Tensor]] = {}  # by place
    for weight in weights:
        place = place_of(weight)
        bucket = latest.get(place)
        if bucket is None or not _has_room(bucket, weight):
            bucket = latest[place] = []
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

    Such a hook runs when the gradients of its module are complete, not those of a bucket.
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
