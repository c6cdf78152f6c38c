"""Half copies of FP32 weights, fresh for every outermost forward.

A weight that several calls use within a forward is cast once: as the forward begins, if the
last one has cast it (`batched_casts.LastForward`), else at its use, by itself.  The copies
belong to that forward and its graph: nothing writes into them again, and none is used by a
later forward, since a `.data` write (an EMA swap) and fused optimizers change weights without
raising `_version`.  Each thread has copies of its own: another thread's forward may begin and
end at any moment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, is_grad_enabled
from torch.nn import Parameter

from .. import native
from ..torch_private.modules import share_block
from ..torch_private.nodes import run_when_ready
from ..torch_private.probes import is_recording
from .batched_casts import Copies, LastForward, cast_in_one_block, cast_into
from .cast_observers import note_copies, observers


@dataclasses.dataclass
class CacheInfo:
    """Counts since the session opened: `hits`, `misses` (casts made) and `entries` held now."""

    hits: int = 0
    misses: int = 0
    entries: int = 0


class _Forward:
    """The copies of one forward, apart by what a gradient finds.

    Those in `graphed` lead back to their weights.  Those in `frozen` want no gradient, as their
    weights.  Those in `plain` were made under `no_grad`, and require one: see `_outside_graph`.
    """

    def __init__(
        self, opener: object, last: LastForward | None = None, below: _Forward | None = None
    ) -> None:
        self.opener = opener
        self.last = last
        self.below = below
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


class _Thread(threading.local):
    def __init__(self) -> None:
        self.forward: _Forward | None = None


class WeightCache:
    """Casts of leaf weights; open only while a managed model's forward runs, in its thread."""

    def __init__(self) -> None:
        self._thread = _Thread()
        self.hits = self.misses = 0

    def open(self, opener: object, last: LastForward | None = None) -> None:
        """Start a forward of `opener`: no copy of an earlier forward is used.

        Within another model's forward nothing happens: the outermost counts.
        If a forward of the opener is still open, it was interrupted (Ctrl-C skips
        hooks) or calls itself: then the new one begins without copies, which is right
        for both.
        """
        thread = self._thread
        if thread.forward is not None and thread.forward.opener is not opener:
            return
        if is_recording():
            thread.forward = None
            return
        thread.forward = forward = _Forward(opener, last)
        if last is not None:
            for weights in last.buckets():
                self._begin_with(forward, weights, last.dtype)

    def _begin_with(self, forward: _Forward, weights: list[Tensor], dtype: torch.dtype) -> None:
        """Cast weights that all belong into the graph, or all outside of it."""
        in_graph = weights[0].requires_grad and is_grad_enabled()
        copies = forward.copies_for(weights[0].requires_grad)
        cast_into(copies, weights, dtype, in_graph)
        run_when_ready(copies[id(weights[0])][0])
        forward.kept.append(weights)
        self.misses += len(weights)
        if observers:
            note_copies([copies[id(one)][0] for one in weights])

    def close(self, opener: object = None) -> None:
        """End the forward of `opener`, or (None) whatever is open.  Safe to call when closed."""
        thread = self._thread
        forward = thread.forward
        if forward is None or (opener is not None and opener is not forward.opener):
            return
        thread.forward = None
        if forward.last is not None:
            forward.last.note(forward.used)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Context manager: code inside has copies of its own, each cast at its use, by itself.

        For the function that an activation checkpoint runs twice: both times it makes the same
        calls, and a weight used twice sums its gradients in the dtype that it has without the
        checkpoint.
        """
        found = self._thread.forward
        own = self._thread.forward = None if is_recording() else _Forward(object(), below=found)
        try:
            yield
        finally:
            if self._thread.forward is own:
                self._thread.forward = found

    def info(self) -> CacheInfo:
        """A snapshot of the counts; entries are this thread's."""
        forward = self._thread.forward
        return CacheInfo(self.hits, self.misses, 0 if forward is None else len(forward))

    def forget(self, weight: Tensor) -> None:
        """Cast the weight at each use, from now to the end of this thread's forward.

        For a weight that may be written into without raising its version.
        """
        forward = self._thread.forward
        while forward is not None:
            forward.touched.add(id(weight))
            for copies in (forward.graphed, forward.frozen, forward.plain):
                copies.pop(id(weight), None)
            forward = forward.below

    def forget_all(self) -> None:
        """Drop this thread's copies: an optimizer has stepped, perhaps without raising versions."""
        forward = self._thread.forward
        if forward is not None:
            forward.graphed, forward.frozen, forward.plain = {}, {}, {}

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`weight` in `dtype`: the copy made earlier in this forward, or a new one.

        A copy still serves if its weight has the version it was made from.
        """
        forward = self._thread.forward
        if forward is None:
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
        forward, versions = self._thread.forward, list(map(_version_of, weights))
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
        self, forward: _Forward, copies: Copies, weight: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """A new copy of `weight`."""
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
    def _may_keep(forward: _Forward, weight: Tensor) -> bool:
        """Whether a copy may serve again.

        Not where it would leak out of a trace or a transform, or could not be saved for a backward
        pass.
        """
        return not (
            id(weight) in forward.touched
            or is_recording()
            or weight.is_inference()
            or forward.in_inference is not torch.is_inference_mode_enabled()
        )


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
