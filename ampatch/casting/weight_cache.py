"""Half copies of FP32 weights, fresh for every outermost forward.

A weight that several calls use within a forward is cast once; with which other
weights, `batched_casts.Plan` says.  The copies belong to that forward and its graph:
nothing writes into them again, and none is used by a later forward, since a `.data`
write (an EMA swap) and fused optimizers change weights without raising `_version`.
Each thread has copies of its own: another thread's forward may begin and end at any
moment.
"""

from __future__ import annotations

import dataclasses
import operator
import threading

import torch
from torch import Tensor, is_grad_enabled

from .. import native
from ..torch_private.probes import computes_with_fakes, is_recording
from .batched_casts import Copies, Plan, alike, cast_into, may_be_planned
from .cast_observers import note_copies, observers
from .kept_copies import KeptCopies


@dataclasses.dataclass
class CacheInfo:
    """Counts since the session opened: `hits`, `misses` (casts made) and `entries` held now."""

    hits: int = 0
    misses: int = 0
    entries: int = 0


class _Forward:
    """The copies of one forward: those in its graph, and those outside of it."""

    def __init__(
        self,
        opener: object,
        plan: Plan | None,
        below: _Forward | None,
        lasting: KeptCopies | None = None,
    ) -> None:
        self.opener = opener
        self.plan = plan
        self.below = below
        self.in_inference = torch.is_inference_mode_enabled()
        self.graphed: Copies = {}
        self.plain: Copies = {}
        self.kept: list[object] = []  # weights with copies, held so that an id stays a weight's own
        self.lasting = lasting  # has what is plain beyond this forward
        if lasting is not None:
            self.plain, self.kept = lasting.store()
        self.used: set[int] = set()  # weights whose copies in the graph were used
        self.alone: dict[int, Tensor] = {}  # weights cast by themselves, in the order of use
        self.touched: set[int] = set()  # weights whose `.data` the user's code may be writing into
        self.is_hooked = False  # its graph has hooks, which may look at gradients there


class _Thread(threading.local):
    def __init__(self) -> None:
        self.forward: _Forward | None = None


class Apart:
    """What `WeightCache.apart` gives: a `with` block, without the price of a generator."""

    __slots__ = ("_found", "_own", "_thread")

    def __init__(self, thread: _Thread) -> None:
        self._thread = thread
        self._own: _Forward | None = None
        self._found: _Forward | None = None

    def __enter__(self) -> None:
        self._found = found = self._thread.forward
        self._own = None if is_recording() else _Forward(object(), None, found)
        self._thread.forward = self._own

    def __exit__(self, *exception: object) -> None:
        if self._thread.forward is self._own:
            self._thread.forward = self._found


class WeightCache:
    """Casts of leaf weights; open only while a managed model's forward runs, in its thread."""

    def __init__(self) -> None:
        self._thread = _Thread()
        self.hits = self.misses = 0

    def open(
        self, opener: object, plan: Plan | None = None, lasting: KeptCopies | None = None
    ) -> None:
        """Start a forward of `opener`: nothing is used as an earlier one left it, but `lasting`.

        Within another model's forward nothing happens: the outermost counts.
        An opener that finds itself was interrupted (Ctrl-C skips hooks) or calls
        itself; both are safe with no copies.
        """
        thread = self._thread
        if thread.forward is not None and thread.forward.opener is not opener:
            return
        if is_recording():
            thread.forward = None
            return
        if lasting is not None:
            thread.forward = None
            lasting.check()
            if computes_with_fakes():
                lasting = None
        plan = plan if plan is not None and plan.begin() else None
        thread.forward = _Forward(opener, plan, None, lasting)

    def close(self, opener: object = None, is_whole: bool = False) -> None:
        """End the forward of `opener`, or (None) whatever is open.  Safe to call when closed.

        Of a forward that is `is_whole`, not one that failed, the plan learns.
        """
        thread = self._thread
        forward = thread.forward
        if forward is None or (opener is not None and opener is not forward.opener):
            return
        thread.forward = None
        if is_whole and forward.plan is not None:
            forward.plan.was_hooked = forward.is_hooked
            if forward.alone or forward.graphed:
                _learn(forward.plan, forward)

    def apart(self) -> Apart:
        """Copies of its own for what runs inside, each weight cast at its use, by itself.

        For what an activation checkpoint runs twice: both times it makes the same calls, and
        a weight used twice sums its gradients in the same dtype as without the checkpoint.
        """
        return Apart(self._thread)

    def info(self) -> CacheInfo:
        """A snapshot of the counts; entries are this thread's."""
        forward = self._thread.forward
        entries = 0 if forward is None else len(forward.graphed) + len(forward.plain)
        return CacheInfo(self.hits, self.misses, entries)

    def forget(self, weight: Tensor) -> None:
        """Cast the weight at each use, from now to the end of this thread's forward.

        For a weight that may be written into without raising its version.
        """
        forward = self._thread.forward
        while forward is not None:
            forward.touched.add(id(weight))
            forward.graphed.pop(id(weight), None)
            forward.plain.pop(id(weight), None)
            forward = forward.below

    def forget_all(self) -> None:
        """An optimizer has stepped within this thread's forward, perhaps raising no versions."""
        forward = self._thread.forward
        if forward is not None:
            forward.graphed, forward.plain = {}, {}

    def note_hook(self) -> None:
        """The graph of this thread's forward gets a hook: cast no weights together from now on,
        nor in the model's next forward.
        """
        forward = self._thread.forward
        if forward is not None:
            forward.is_hooked = True

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`weight` in `dtype`: the copy made earlier in this forward, or a new one.

        A copy still serves if its weight has the version it was made from, and if it can be
        saved for the backward pass.
        """
        forward = self._thread.forward
        if forward is None:
            return _cast_alone(weight, dtype)
        in_graph = weight.requires_grad and is_grad_enabled()
        copies = forward.graphed if in_graph else forward.plain
        copy = copies.get(id(weight))
        if copy is not None:
            half, version = copy
            if (
                version == weight._version
                and half.dtype is dtype
                and not (forward.in_inference and not torch.is_inference_mode_enabled())
            ):
                if in_graph:
                    forward.used.add(id(weight))
                self.hits += 1
                return half
        return self._make(forward, copies, weight, dtype)

    def _make(
        self, forward: _Forward, copies: Copies, weight: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """A new copy of `weight`, made together with those that go with it.

        It is not kept where it would leak out of a trace or a transform, or could not be
        saved for a backward pass.
        """
        if (
            id(weight) in forward.touched
            or is_recording()
            or weight.is_inference()
            or forward.in_inference is not torch.is_inference_mode_enabled()
        ):
            self.misses += 1
            return _cast_alone(weight, dtype)
        together = _together(forward, copies, weight, dtype)
        in_graph = copies is forward.graphed
        cast_into(copies, together, dtype, in_graph, forward.plan)
        forward.kept.append(together)
        if in_graph:
            forward.used.add(id(weight))
        self.misses += len(together)
        if observers:
            note_copies([copies[id(one)][0] for one in together])
        return copies[id(weight)][0]


def _cast_alone(weight: Tensor, dtype: torch.dtype) -> Tensor:
    half = weight.to(dtype)
    if observers:
        note_copies((half,))
    return half


if native.part is not None:  # it casts weights that go alone, where nobody looks at casts
    native.part.watch(observers)

_is_inference = operator.methodcaller("is_inference")


def _together(
    forward: _Forward, copies: Copies, weight: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """The weights to be cast now: `weight`, and those of its bucket that have no copy yet."""
    if forward.plan is None or dtype is torch.float32:
        return [weight]
    bucket = forward.plan.bucket_of.get(id(weight))
    if bucket is None:
        forward.alone.setdefault(id(weight), weight)
        return [weight]
    if forward.is_hooked or forward.plan.was_hooked or id(weight) in copies:
        return [weight]
    found = alike(weight, bucket) if is_grad_enabled() else bucket  # no graph: no hooks to respect
    if forward.touched or not copies.keys().isdisjoint(map(id, found)):
        known = copies.keys() | forward.touched
        found = [one for one in found if id(one) not in known]
    return found or [weight]  # it has got hooks, say


def _learn(plan: Plan, forward: _Forward) -> None:
    unused = forward.graphed.keys() - forward.used
    new = [weight for weight in forward.alone.values() if may_be_planned(weight)]
    if new or unused:
        plan.learn(new, unused)
