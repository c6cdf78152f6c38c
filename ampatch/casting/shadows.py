"""Leaf half shadows: half copies of weights that live on, cast in batches both ways.

A shadow is a leaf of the graph that stands in for a weight.  At the start of each
outermost forward one `_foreach_copy_` brings the shadows of a model up to date;
after each backward pass one more takes the gradients that autograd left in them
to the weights' FP32 `.grad`, where everybody looks for them.

What sees the inside of a backward pass must meet the weight itself: a weight that
is watched (`shadow_grads.is_watched`) has no shadow and is cast in the graph.  So
are all weights where ranks talk, under forward-mode AD, in traces and transforms,
and when several forwards wait for one backward pass, since gradients add up in
half in a shadow.
"""

from __future__ import annotations

import itertools
import operator
import weakref

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import foreach
from ..flat_grads import FlatGrads
from ..surroundings import are_ranks, set_grad_enabled
from .shadow_grads import (
    backward_hooks_of,
    deliver_by_itself,
    hooks_of,
    is_watched,
    late_hooks_of,
    move,
    wants_grad,
)

try:
    from torch._C import _len_torch_function_stack as _function_modes
except ImportError:

    def _function_modes() -> int:
        """Without a way to ask, modes see what batched casts are made of."""
        return 0


MOST_WAITING = 4
"""Forwards under grad that may wait for a backward pass; in further ones weights are cast."""

LARGEST = 2**14
"""Elements, on the CPU.  The cast of a larger weight costs bandwidth, and its shadow memory."""

SUPPORTED = all(
    hasattr(Tensor, name) for name in ("_version", "_backward_hooks", "_post_accumulate_grad_hooks")
)
"""Whether this torch lets us see hooks and versions.  Without, weights are cast in the graph."""

_grad_of = operator.attrgetter("half.grad")
_weight_of = operator.attrgetter("weight")
_version_of = operator.attrgetter("_version")
_alive = weakref.ref.__call__
_data_ptr, _numel, _dim = Tensor.data_ptr, Tensor.numel, Tensor.dim


class Shadow:
    """The half copy of one weight, and the weight's state when it was last brought up to date.

    `half` is the leaf.  `raw` is the same memory, written without autograd taking note:
    graphs that hold the shadow of a weight that nobody changed stay valid.
    """

    __slots__ = ("dtype", "half", "pointer", "raw", "version", "wants_grad", "weight")

    def __init__(self, weight: weakref.ref[Tensor], half: Tensor) -> None:
        self.weight = weight
        self.half = half
        self.dtype = half.dtype
        self.raw = half.data
        self.note(weight())

    def note(self, weight: Tensor) -> None:
        """Remember the weight's state: the shadow is up to date with it."""
        self.version, self.pointer = weight._version, weight.data_ptr()
        self.wants_grad = weight.requires_grad


class Shadows:
    """The shadows of the weights that one model uses; `of` has them by the weight's id."""

    def __init__(self) -> None:
        self.of: dict[int, Shadow] = {}
        self._listing = _Listing([])  # `of` once more
        self._unlisted: list[int] = []  # weights that have come or gone since `_list`
        self._in_doubt = False  # a weight was not what its shadow said when it was used
        self.refused: dict[int, weakref.ref[Tensor]] = {}  # known to be hopeless
        self._waiting = 0
        self.flats: FlatGrads | None = FlatGrads()  # None: there are larger weights too

    def begin(self) -> bool:
        """An outermost forward starts: whether shadows may be used in it.  They are up to date."""
        if torch.is_grad_enabled():
            if self._waiting == MOST_WAITING:
                return False
            self._waiting += 1
        # Ranks have hooks where we cannot see them; a `TorchFunctionMode` would see more calls
        # than the model makes.
        if (
            not SUPPORTED
            or are_ranks()
            or _function_modes() > 0
            or getattr(forward_ad, "_current_level", 0) >= 0
        ):
            return False
        if self.of:
            self._refresh()
        for key, reference in list(self.refused.items()):
            weight = reference()
            if weight is None or not _is_hopeless(weight):
                self.refused.pop(key, None)
        return True

    def add(self, weight: Tensor, dtype: torch.dtype) -> Shadow | None:
        """Make the shadow of a weight.  None: this weight is to be cast in the graph."""
        key = id(weight)
        if key in self.of:
            self._in_doubt = True
            return None
        if not _may_have_shadow(weight):
            return None
        if _is_hopeless(weight):
            if weight.numel() > LARGEST:
                self.flats = None
            self.refused[key] = weakref.ref(weight)
            return None
        if is_watched(weight):
            return None
        half = weight.detach().to(dtype).requires_grad_(weight.requires_grad)
        of, unlisted = self.of, self._unlisted

        def gone(_: weakref.ref) -> None:
            of.pop(key, None)
            unlisted.append(key)

        unlisted.append(key)
        shadow = Shadow(weakref.ref(weight, gone), half)
        return of.setdefault(key, shadow)  # another thread may have been faster

    def collect(self) -> None:
        """A backward pass has ended: take the gradients in the shadows to the weights."""
        self._waiting = 0
        found = list(self.of.values())
        grads = list(map(_grad_of, found))
        if any(map(operator.is_, grads, itertools.repeat(None))):
            found = [shadow for shadow in found if shadow.half.grad is not None]
            grads = list(map(_grad_of, found))
        if found:
            for shadow in found:
                shadow.half.grad = None
            move(list(map(weakref.ref.__call__, map(_weight_of, found))), grads, self.flats)

    def retire(self) -> None:
        """Nobody will collect any more: graphs that still hold shadows deliver by themselves."""
        for shadow in list(self.of.values()):
            self._retire(shadow)

    def _retire(self, shadow: Shadow) -> None:
        weight = shadow.weight()
        if weight is not None and self.of.get(id(weight)) is shadow:
            self.of.pop(id(weight), None)
            self._unlisted.append(id(weight))
            grad, shadow.half.grad = shadow.half.grad, None
            if grad is not None:
                move([weight], [grad])
            deliver_by_itself(shadow.weight, shadow.half)

    # Bringing up to date

    def _refresh(self) -> None:
        """Copy all weights, if none of them has changed in kind."""
        listing = self._listing
        weights = list(map(_alive, listing.refs))
        if self._unlisted:
            listing, weights = self._weights()
        versions = list(map(_version_of, weights))
        if (
            self._in_doubt
            or list(map(_data_ptr, weights)) != listing.pointers
            or list(map(wants_grad, weights)) != listing.wanting
            or list(map(_numel, weights)) != listing.numels
            or list(map(_dim, weights)) != listing.dims
            or any(map(backward_hooks_of, weights))
            or any(map(late_hooks_of, weights))
        ):
            self._catch_up(listing, weights)
            return
        if versions == listing.versions:  # yet `.data` writes and fused optimizers leave no trace
            targets = listing.raws
        elif any(map(operator.eq, versions, listing.versions)):
            self._catch_up(listing, weights)
            return
        else:
            targets = listing.halves
        found = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            foreach.copy_(targets, weights)
        except RuntimeError:  # shapes that differ in nothing of the above; else it comes again
            self._catch_up(listing, weights)
            return
        finally:
            set_grad_enabled(found)
        if targets is listing.halves:
            listing.versions = versions
            for shadow, version in zip(listing.shadows, versions):
                shadow.version = version

    def _catch_up(self, listing: _Listing, weights: list[Tensor]) -> None:
        """Weight by weight: some have changed, been moved, frozen or got hooks."""
        for shadow, weight in zip(listing.shadows, weights, strict=True):
            half = shadow.half
            if any(hooks_of(weight)) or not _fits(half, weight):
                self._retire(shadow)
                continue
            half.requires_grad_(weight.requires_grad)
            unchanged = (shadow.version, shadow.pointer) == (weight._version, weight.data_ptr())
            with torch.no_grad():
                (shadow.raw if unchanged else half).copy_(weight)
            shadow.note(weight)
        self._list()

    def _weights(self) -> tuple[_Listing, list[Tensor]]:
        """All shadows listed, and their weights, which may die at any time."""
        while True:
            listing = self._listing
            weights = list(map(_alive, listing.refs))
            if not self._unlisted:
                return listing, weights
            self._list()

    def _list(self) -> None:
        self._unlisted.clear()
        self._in_doubt = False
        self._listing = _Listing(list(self.of.values()))


class _Listing:
    """Shadows, and beside them what is read in bulk; another thread may make a new one meanwhile."""

    __slots__ = (
        "dims",
        "halves",
        "numels",
        "pointers",
        "raws",
        "refs",
        "shadows",
        "versions",
        "wanting",
    )

    def __init__(self, shadows: list[Shadow]) -> None:
        self.shadows = shadows
        self.refs = [shadow.weight for shadow in shadows]
        self.halves = [shadow.half for shadow in shadows]
        self.raws = [shadow.raw for shadow in shadows]
        self.versions = [shadow.version for shadow in shadows]
        self.pointers = [shadow.pointer for shadow in shadows]
        self.wanting = list(map(wants_grad, self.halves))
        self.numels = list(map(_numel, self.halves))
        self.dims = list(map(_dim, self.halves))


def _fits(half: Tensor, weight: Tensor) -> bool:
    return (
        half.shape == weight.shape
        and half.stride() == torch.empty_like(weight).stride()  # as a new half copy would have
        and half.device == weight.device
        and weight.dtype is torch.float32
    )


def _is_hopeless(weight: Tensor) -> bool:
    """Whether a look at the weight shows that it may have none: it has hooks, or is too large."""
    return any(hooks_of(weight)) or (weight.is_cpu and weight.numel() > LARGEST)


def _may_have_shadow(weight: Tensor) -> bool:
    return (
        weight.dtype is torch.float32
        and weight.is_leaf
        and weight.layout is torch.strided
        and (weight.is_cuda or weight.is_cpu)
        and not weight.is_inference()
        and not torch.is_inference_mode_enabled()
    )
