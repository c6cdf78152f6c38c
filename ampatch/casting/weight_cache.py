"""Half copies of FP32 weights, fresh for every outermost forward.

A weight that several calls use within a forward is cast once: as the forward begins, if the
last one has cast it (`batched_casts.LastForward`), else at its use, by itself.  The copies
belong to that forward and its graph: nothing writes into them again, and none is used by a
later forward, since a `.data` write (an EMA swap) and fused optimizers change weights without
raising `_version`.  The calls of a thread hold them (`calls.here`): another thread's forward may
begin and end at any moment.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

import torch
from torch import Tensor, is_grad_enabled
from torch.nn import Parameter

from .. import native
from ..torch_private.modules import share_block
from ..torch_private.probes import is_recording, run_when_ready
from .batched_casts import Copies, LastForward, cast_apart, cast_in_one_block, cast_into
from .calls import Call, here
from .cast_observers import note_copies, observers


@dataclasses.dataclass
class CacheInfo:
    """Counts since the session opened: `hits`, `misses` (casts made) and `entries` held now."""

    hits: int = 0
    misses: int = 0
    entries: int = 0


class ForwardCopies:
    """The copies of one forward, apart by what a gradient finds.

    Those in `graphed` lead back to their weights.  Those in `frozen` want no gradient, as their
    weights.  Those in `plain` were made under `no_grad`, and require one: see `_outside_graph`.
    """

    def __init__(self, cache: WeightCache, last: LastForward | None = None) -> None:
        self.cache = cache
        self.last = last
        self.below: ForwardCopies | None = here.copies
        self.in_inference = torch.is_inference_mode_enabled()
        self.graphed: Copies = {}
        self.frozen: Copies = {}
        self.plain: Copies = {}
        self.kept: list[object] = []  # weights with copies, held so that an id stays a weight's own
        self.used: dict[int, Tensor] = {}  # weights whose copies were used, by id, in that order
        self.touched: set[int] = set()  # weights whose `.data` the user's code may be writing into

    def copies_for(self, wants_grad: bool) -> Copies:
        """Where the copies are that serve under the current grad mode."""
        if not is_grad_enabled():
            return self.plain
        return self.graphed if wants_grad else self.frozen

    def __len__(self) -> int:
        return len(self.graphed) + len(self.frozen) + len(self.plain)


class WeightCache:
    """Casts of leaf weights; copies serve again while a managed model's forward runs."""

    _here = here  # for the native part

    def __init__(self) -> None:
        self.hits = self.misses = 0

    def open(self, call: Call, last: LastForward | None = None) -> None:
        """Copies serve until `call`, the innermost one, ends.

        Within another forward of this cache nothing happens: the copies of that one serve.
        """
        found = here.copies
        if found is not None and found.cache is self:
            return
        if is_recording():
            call.copies = here.copies = None
            return
        call.copies = call.opened_copies = here.copies = forward = ForwardCopies(self, last)
        if last is None:
            return
        last.has_own_nodes = last.wants_own_nodes
        for weights in last.buckets():
            in_graph = weights[0].requires_grad and is_grad_enabled()
            copies = forward.graphed if in_graph else forward.frozen
            if not is_grad_enabled():
                copies = forward.plain
            if in_graph and last.wants_own_nodes:
                versions = list(map(_version_of, weights))
                halves = cast_apart(weights, last.dtype)
                copies.update(zip(map(id, weights), zip(halves, versions)))
            else:
                cast_into(copies, weights, last.dtype, in_graph)
                run_when_ready(copies[id(weights[0])][0])
            forward.kept.append(weights)
            self.misses += len(weights)
            if observers:
                note_copies([copies[id(one)][0] for one in weights])

    def open_apart(self, call: Call) -> None:
        """The code of `call`, the innermost one, has copies of its own, each cast at its use.

        For the function that an activation checkpoint runs twice: both times it makes the same
        calls, and a weight used twice sums its gradients in the dtype that it has without the
        checkpoint.
        """
        call.copies = here.copies = None if is_recording() else ForwardCopies(self)

    def _forward_here(self) -> ForwardCopies | None:
        """The copies of this cache that serve here and now."""
        forward = here.copies
        return None if forward is None or forward.cache is not self else forward

    def info(self) -> CacheInfo:
        """A snapshot of the counts; entries are this thread's."""
        forward = self._forward_here()
        return CacheInfo(self.hits, self.misses, 0 if forward is None else len(forward))

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`weight` in `dtype`: the copy made earlier in this forward, or a new one.

        A copy still serves if its weight has the version it was made from.

        In C++: `cast_weight` of `call.h`.
        """
        forward = here.copies
        if forward is None or forward.cache is not self:
            return _cast_alone(weight, dtype)
        if not is_grad_enabled():  # as `copies_for`, without the price of a call
            copies = forward.plain
        else:
            copies = forward.graphed if weight.requires_grad else forward.frozen
        copy = copies.get(id(weight))
        if copy is not None:
            half, version = copy
            if version == weight._version and half.dtype is dtype:
                forward.used.setdefault(id(weight), weight)
                self.hits += 1
                return half
        return self._make(forward, copies, weight, dtype)

    def cast_block(self, weights: list[Parameter], dtype: torch.dtype) -> Sequence[Tensor]:
        """As `cast`, for the weights of an RNN, which share one block of memory: so do the copies.

        cuDNN wants them so, else it copies them, and warns, at every call.  They are cast at their
        use, and never as a forward begins.
        """
        forward, versions = self._forward_here(), list(map(_version_of, weights))
        if forward is None:
            return _noted(cast_in_one_block(weights, dtype))
        copies = forward.copies_for(any(map(_wants_grad, weights)))
        found = [copies.get(id(weight), (None, None)) for weight in weights]
        halves = [half for half, _ in found if half is not None and half.dtype is dtype]
        if (
            len(halves) == len(weights)
            and [version for _, version in found] == versions
            and share_block(halves)
        ):
            self.hits += len(weights)
            return halves
        self.misses += len(weights)
        made = _noted(cast_in_one_block(weights, dtype))
        if all(self._may_keep(forward, weight) for weight in weights):
            copies.update(zip(map(id, weights), zip(made, versions)))
            forward.kept.append(weights)
        return made

    def _make(
        self, forward: ForwardCopies, copies: Copies, weight: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """A new copy of `weight`.

        In C++: `cast_here` of `call.h`.
        """
        self.misses += 1
        if not self._may_keep(forward, weight):
            return _cast_alone(weight, dtype)
        version = weight._version  # before the cast: another thread may write meanwhile
        half = _cast_alone(weight, dtype)
        if not is_grad_enabled():
            half.requires_grad = True
        copies[id(weight)] = half, version
        forward.kept.append(weight)
        forward.used.setdefault(id(weight), weight)
        return half

    @staticmethod
    def _may_keep(forward: ForwardCopies, weight: Tensor) -> bool:
        """Whether a copy may serve again.

        Not where it would leak out of a trace or a transform, or could not be saved for a backward
        pass.

        In C++: `is_cast_here` of `call.h`.
        """
        return not (
            id(weight) in forward.touched
            or is_recording()
            or weight.is_inference()
            or forward.in_inference is not torch.is_inference_mode_enabled()
        )


def forget(weight: Tensor) -> None:
    """Cast the weight at each use, from now to the end of this thread's forwards.

    For a weight that may be written into without raising its version.
    """
    forward = here.copies
    while forward is not None:
        forward.touched.add(id(weight))
        for copies in (forward.graphed, forward.frozen, forward.plain):
            copies.pop(id(weight), None)
        forward = forward.below


def forget_all() -> None:
    """Drop this thread's copies: an optimizer has stepped, perhaps without raising versions."""
    forward = here.copies
    while forward is not None:
        forward.graphed, forward.frozen, forward.plain = {}, {}, {}
        forward = forward.below


def _cast_alone(weight: Tensor, dtype: torch.dtype) -> Tensor:
    [half] = _noted([weight.to(dtype)])
    return half


def _noted(halves: Sequence[Tensor]) -> Sequence[Tensor]:
    if observers:
        note_copies(halves)
    return halves


_version_of = operator.attrgetter("_version")
_wants_grad = operator.attrgetter("requires_grad")


if native.part is not None:  # it casts weights at their use, unless there are observers
    native.part.watch(observers)
