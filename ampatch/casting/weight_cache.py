"""Half copies of FP32 weights, fresh for every outermost forward.

A weight that several calls use within a forward is cast once: as the forward begins, if the last
forward used it (`WeightUsage`), else at its first use, alone.  The copies belong to that
forward and its graph.  No code writes into them.  No later forward uses them, because a `.data`
write (an EMA swap) and fused optimizers change weights without bumping `_version`.  The calls of a
thread hold the copies (`calls.thread_calls`), so forwards in other threads have copies of their
own.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled, nn

from .. import native
from ..torch_private.modules import share_storage
from ..torch_private.probes import is_traced_or_transformed
from .calls import Call, thread_calls
from .cast_observers import observers, report_copies
from .half_copies import Buckets, are_partly_wanted, cast_weights, may_share_node

HalfCopiesById = dict[int, tuple[Tensor, int]]
"""Half copies, each with the version of its weight, by the weight's id."""


@dataclasses.dataclass
class CacheInfo:
    """Counts since the session opened: `hits`, `misses` (casts made) and `entries` held now."""

    hits: int = 0
    misses: int = 0
    entries: int = 0


class LastUse(NamedTuple):
    """The weights that a forward used: their ids, and buckets of those that may share a node."""

    ids: list[int]
    buckets: Buckets


class WeightUsage:
    """The weights whose copies in `dtype` the model's last forward used, in order of use.

    The next forward casts them in advance.  A weight whose dtype or device has changed since then
    is cast too, but its copy is not used.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._model = model
        # One assignment changes both fields, because several threads may run the model.
        self.last_use = LastUse([], Buckets((), model, model))
        self._ids: set[int] = set()  # ids of all weights that the model's forwards have used
        self.wants_own_nodes = False  # whether the next forward makes a node for each weight
        self.has_own_nodes = False  # whether the last forward made a node for each weight

    def record(self, used: dict[int, Tensor]) -> None:
        """Record the weights, by id, whose copies a forward has used, in this order."""
        ids = list(used)
        if ids != self.last_use.ids:
            weights = filter(may_share_node, used.values())
            self.last_use = LastUse(ids, Buckets(weights, self._model, self._model))
            self._ids = self._ids.union(ids)

    def record_wanted_grads(self, wanted: Collection[int]) -> bool:
        """Record that the script asks for the gradients of these weights (ids).

        If they are some but not all of the weights that forwards use, the next forward makes one
        node per weight.  Returns True if, in a graph that exists already, one of them may share its
        cast node with other weights.
        """
        if self.has_own_nodes or self._ids.isdisjoint(wanted):
            return False
        used = [weight for weight in self._model.parameters() if id(weight) in self._ids]
        only_some = are_partly_wanted(used, wanted)
        self.wants_own_nodes |= only_some
        return only_some


class ForwardCopies:
    """The half copies of one forward, in a dict for each grad mode and `requires_grad`.

    * `in_graph`: copies with an autograd node that leads back to their weights.
    * `frozen`: copies of weights that require no gradient.
    * `under_no_grad`: copies made under `no_grad`.  All of them require a gradient, which makes
      `F.linear` faster (see `cast_weights`); only torch's functions get these copies.
    """

    def __init__(self, cache: WeightCache, usage: WeightUsage | None = None) -> None:
        self.cache = cache
        self.usage = usage
        self.outer: ForwardCopies | None = thread_calls.forward_copies
        self.in_inference_mode = torch.is_inference_mode_enabled()
        self.in_graph: HalfCopiesById = {}
        self.frozen: HalfCopiesById = {}
        self.under_no_grad: HalfCopiesById = {}
        # The weights that have copies.  Keeps their ids from being reused.
        self.kept_weights: list[object] = []
        # The weights whose copies were used, by id, in order of use.
        self.used_weights: dict[int, Tensor] = {}
        # Ids of weights that a write through `.data` may change.
        self.cast_at_each_use_ids: set[int] = set()

    def copies_for(self, wants_grad: bool) -> HalfCopiesById:
        """The copies for the current grad mode."""
        if not is_grad_enabled():
            return self.under_no_grad
        return self.in_graph if wants_grad else self.frozen

    def __len__(self) -> int:
        return len(self.in_graph) + len(self.frozen) + len(self.under_no_grad)


class WeightCache:
    """Casts leaf weights, each once while a managed model's forward runs."""

    _thread_calls = thread_calls  # read by the native part

    def __init__(self) -> None:
        self.hits = self.misses = 0

    def open(self, call: Call, usage: WeightUsage | None = None) -> None:
        """Keep half copies until the exit of `call`, the innermost call.

        Does nothing inside another forward of this cache: that forward's copies are used.
        """
        outer = thread_calls.forward_copies
        if outer is not None and outer.cache is self:
            return
        if is_traced_or_transformed():
            call.forward_copies = thread_calls.forward_copies = None
            return
        forward_copies = ForwardCopies(self, usage)
        call.opened_forward_copies = forward_copies
        call.forward_copies = thread_calls.forward_copies = forward_copies
        if usage is None:
            return
        usage.has_own_nodes = usage.wants_own_nodes
        for weights in usage.last_use.buckets.lists_to_cast():
            versions = list(map(_version_of, weights))  # read first: another thread may write
            half_copies = cast_weights(weights, usage.dtype, own_nodes=usage.wants_own_nodes)
            copies = forward_copies.in_graph if weights[0].requires_grad else forward_copies.frozen
            if not is_grad_enabled():
                copies = forward_copies.under_no_grad
                for half_copy in half_copies:
                    half_copy.requires_grad = True
            copies.update(zip(map(id, weights), zip(half_copies, versions)))
            forward_copies.kept_weights.append(weights)
            self.misses += len(weights)
            if observers:
                report_copies(half_copies)

    def open_for_checkpoint(self, call: Call) -> None:
        """Give `call`, the innermost call, half copies of its own, each cast at its first use.

        For a checkpointed function, which runs twice.  It makes the same casts both times, and the
        gradients of a weight that it uses twice are summed in the same dtype as without the
        checkpoint.
        """
        forward_copies = None if is_traced_or_transformed() else ForwardCopies(self)
        call.forward_copies = thread_calls.forward_copies = forward_copies

    def _thread_copies(self) -> ForwardCopies | None:
        """The copies of this cache that this thread uses now."""
        forward_copies = thread_calls.forward_copies
        if forward_copies is None or forward_copies.cache is not self:
            return None
        return forward_copies

    def info(self) -> CacheInfo:
        """A snapshot of the counts; `entries` counts this thread's copies."""
        forward_copies = self._thread_copies()
        entries = 0 if forward_copies is None else len(forward_copies)
        return CacheInfo(self.hits, self.misses, entries)

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `weight` in `dtype`: the copy that this forward has, or a new one.

        A copy is used again as long as the version of its weight has not changed.

        In C++: `cast_weight` of `call.h`.
        """
        forward_copies = thread_calls.forward_copies
        if forward_copies is None or forward_copies.cache is not self:
            return _report_to_observers([weight.to(dtype)])[0]
        if not is_grad_enabled():  # inlined `copies_for`
            copies = forward_copies.under_no_grad
        else:
            copies = forward_copies.in_graph if weight.requires_grad else forward_copies.frozen
        key = id(weight)
        entry = copies.get(key)
        if entry is not None:
            half_copy, version = entry
            if version == weight._version and half_copy.dtype is dtype:
                forward_copies.used_weights[key] = weight
                self.hits += 1
                return half_copy
        return self._make_copy(forward_copies, copies, weight, dtype)

    def cast_flat_weights(self, weights: list[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
        """Like `cast`, but for the flattened weights of an RNN, which share one storage.

        Their copies share a storage too: else cuDNN copies the weights, and warns, at every call.
        They are cast at their first use, and never as a forward begins.
        """
        forward_copies = self._thread_copies()
        versions = list(map(_version_of, weights))
        if forward_copies is None:
            return _report_to_observers(cast_weights(weights, dtype, in_one_storage=True))
        copies = forward_copies.copies_for(any(map(_wants_grad, weights)))
        entries = [copies.get(id(weight), (None, None)) for weight in weights]
        half_copies = [copy for copy, _ in entries if copy is not None and copy.dtype is dtype]
        if (
            len(half_copies) == len(weights)
            and [version for _, version in entries] == versions
            and share_storage(half_copies)
        ):
            self.hits += len(weights)
            return half_copies
        self.misses += len(weights)
        new_copies = _report_to_observers(cast_weights(weights, dtype, in_one_storage=True))
        if all(self._may_keep_copy(forward_copies, weight) for weight in weights):
            copies.update(zip(map(id, weights), zip(new_copies, versions)))
            forward_copies.kept_weights.append(weights)
        return new_copies

    def _make_copy(
        self,
        forward_copies: ForwardCopies,
        copies: HalfCopiesById,
        weight: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Make a new copy of `weight`.  In C++: `make_copy` of `call.h`."""
        self.misses += 1
        if not self._may_keep_copy(forward_copies, weight):
            return _report_to_observers([weight.to(dtype)])[0]
        version = weight._version  # read before the cast: another thread may write at the same time
        [half_copy] = _report_to_observers(cast_weights([weight], dtype, own_nodes=True))
        if not is_grad_enabled():
            half_copy.requires_grad = True
        copies[id(weight)] = half_copy, version
        forward_copies.kept_weights.append(weight)
        forward_copies.used_weights.setdefault(id(weight), weight)
        return half_copy

    @staticmethod
    def _may_keep_copy(forward_copies: ForwardCopies, weight: Tensor) -> bool:
        """Whether a copy may be used again.

        False if the copy would leak from a trace or a transform, or if autograd cannot save it for
        backward (inference mode).

        In C++: `may_keep_copy` of `call.h`.
        """
        return not (
            id(weight) in forward_copies.cast_at_each_use_ids
            or is_traced_or_transformed()
            or weight.is_inference()
            or forward_copies.in_inference_mode is not torch.is_inference_mode_enabled()
        )


def cast_at_each_use(weight: Tensor) -> None:
    """Cast `weight` at each use, from now to the end of this thread's forwards.

    For a weight that code may change without bumping its version.
    """
    forward_copies = thread_calls.forward_copies
    while forward_copies is not None:
        forward_copies.cast_at_each_use_ids.add(id(weight))
        for copies in (
            forward_copies.in_graph,
            forward_copies.frozen,
            forward_copies.under_no_grad,
        ):
            copies.pop(id(weight), None)
        forward_copies = forward_copies.outer


def drop_copies() -> None:
    """Drop this thread's copies.  Called after optimizer steps: not all bump versions."""
    forward_copies = thread_calls.forward_copies
    while forward_copies is not None:
        forward_copies.in_graph, forward_copies.frozen, forward_copies.under_no_grad = {}, {}, {}
        forward_copies = forward_copies.outer


def _report_to_observers(half_copies: Sequence[Tensor]) -> Any:
    if observers:
        report_copies(half_copies)
    return half_copies


_version_of = operator.attrgetter("_version")
_wants_grad = operator.attrgetter("requires_grad")


if native.part is not None:  # `call_cast` of call.h casts weights itself unless there are observers
    native.part.set_observers(observers)
