"""FP32 gradients of small weights as slices of one buffer, which the next pass uses again.

One kernel call then unscales and checks them all, and a backward pass allocates
nothing for them.  A gradient is its owner's for as long as anybody holds it, as
itself, through an alias (`detach()`, `numpy()`, a view) or in a graph.  So before
a buffer is used again everything that can hold it is counted; where this torch
cannot be asked, each pass has new tensors.
"""

from __future__ import annotations

import itertools
import operator
import sys
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import Parameter

FEWEST = 16
"""Weights.  For fewer, counting who holds their gradients costs what it saves."""

LARGEST = 2**14
"""Elements of a weight.  The gradient of a larger one costs bandwidth, not calls, and beside
it the small ones matter little: where there is one, nothing stays allocated between passes."""

MOST = 2**16
"""Elements of all, a quarter of a megabyte: that much stays allocated between two passes."""

RENEWED = {"cuda"}
"""Device types whose buffers get their memory anew from torch's allocator each time.

It knows which streams (`record_stream`) and which graph captures still use a block;
nothing that can be asked of a tensor tells.
"""

_ALIGNED = 16  # FP32 elements in 64 bytes
_DEVICES = ("cpu", "cuda")

_data_ptr = Tensor.data_ptr
_size = Tensor.size
_requires_grad = operator.attrgetter("requires_grad")
_storage_count = getattr(torch._C, "_storage_Use_Count", None)
_increment_version = getattr(torch._C, "_increment_version", None)
if _increment_version is not None:
    try:
        _increment_version([])
    except (TypeError, RuntimeError):  # of one tensor at a time
        _of_one = _increment_version

        def _increment_version(tensors: list[Tensor]) -> None:
            """Raise the version of each."""
            for tensor in tensors:
                _of_one(tensor)


class FlatGrads:
    """The gradients of one list of weights at a time: a model's, or an optimizer's masters."""

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []  # two: where gradients add up, old ones wait beside new
        self._missed: list[int] = []
        self._is_fit = False

    def take(self, weights: list[Tensor]) -> list[Tensor]:
        """A tensor like each weight, for values to be written into; nobody else has it.

        Weights that come together for the first time have tensors of their own:
        it may be the last time too.
        """
        if len(weights) < FEWEST:
            return list(map(torch.empty_like, weights))
        for buffer in self._buffers:
            slices = buffer.hand_out(weights)
            if slices is not None:
                return slices
        asked = list(map(id, weights))
        if asked != self._missed:
            self._missed, self._is_fit = asked, _may_be_flat(weights)
        elif self._is_fit:
            self._missed = []
            with torch.inference_mode(False):  # inference tensors could not be written elsewhere
                buffer = _Buffer(weights)
            self._buffers = [buffer, *self._buffers[:1]]
            return list(buffer.slices)
        return list(map(torch.empty_like, weights))

    def whole(self, grads: list[Tensor]) -> list[Tensor]:
        """`grads`, for who is about to write into all of them: slices that make up a whole
        buffer as that one tensor, its gaps zero.  Their versions rise as if each were written.
        """
        for buffer in self._buffers:
            grads = buffer.in_place_of_slices(grads)
        return grads


class _Buffer:
    """One tensor, and slices of it like `weights`, which are no views to autograd."""

    def __init__(self, weights: list[Tensor]) -> None:
        self._weights = [weakref.ref(weight) for weight in weights]
        self._weight_pointers = list(map(_data_ptr, weights))
        starts = list(_starts(map(Tensor.numel, weights)))
        self._flat = flat = torch.zeros(starts[-1], dtype=torch.float32, device=weights[0].device)
        self.slices = [
            flat.as_strided(weight.shape, torch.empty_like(weight).stride(), start).data
            for start, weight in zip(starts, weights, strict=False)
        ]
        self._storage = flat.untyped_storage()
        self._pointers = list(map(_data_ptr, self.slices))
        self._sizes = list(map(_size, self.slices))
        self._counts = self._count()
        self._mine: list[bool] = []  # which of the gradients last given are slices,
        self._found: list[int] = []  # and the ids of these

    def hand_out(self, weights: list[Tensor]) -> list[Tensor] | None:
        """The slices, or None: these are other weights, or they have moved; somebody holds a
        slice, or has made something else of it.
        """
        slices = self.slices
        if (
            not all(map(operator.is_, map(_target, self._weights), weights))
            or list(map(_data_ptr, weights)) != self._weight_pointers
            or self._count() != self._counts
            or list(map(_data_ptr, slices)) != self._pointers
            or list(map(_size, slices)) != self._sizes
            or list(map(_size, weights)) != self._sizes
            or any(map(_requires_grad, slices))
        ):
            return None
        if self._flat.device.type in RENEWED:
            self._renew()
        return slices.copy()

    def _count(self) -> tuple:
        """How many hold each slice, and the memory: slices and their aliases."""
        return (
            list(map(sys.getrefcount, self.slices)),
            _owners and list(map(_owners, self.slices)),
            sys.getrefcount(self._storage),
            _storage_count(self._storage._cdata),
        )

    def _renew(self) -> None:
        size = self._storage.nbytes()
        self._storage.resize_(0)
        self._storage.resize_(size)
        self._flat.zero_()
        self._pointers = list(map(_data_ptr, self.slices))

    def in_place_of_slices(self, grads: list[Tensor]) -> list[Tensor]:
        """`FlatGrads.whole`, for this one."""
        if len(grads) < len(self.slices):
            return grads
        found = list(map(id, itertools.compress(grads, self._mine)))
        if (len(grads) != len(self._mine) or found != self._found) and not self._find(grads):
            return grads
        if list(map(_data_ptr, self.slices)) != self._pointers:
            return grads
        _increment_version(self.slices)
        return [self._flat, *itertools.compress(grads, map(operator.not_, self._mine))]

    def _find(self, grads: list[Tensor]) -> bool:
        """Whether every slice is among `grads`, as a rule at the same places each time."""
        mine, asked = set(map(id, self.slices)), list(map(id, grads))
        if _increment_version is None or not mine.issubset(asked):
            return False
        self._mine = [key in mine for key in asked]
        self._found = [key for key in asked if key in mine]
        return True


def _may_be_flat(weights: list[Tensor]) -> bool:
    """Whether a buffer pays for these weights, and who holds it can be counted."""
    return (
        _CAN_COUNT
        and all(map(_is_small, weights))
        and sum(map(Tensor.numel, weights)) <= MOST
        and len({weight.device for weight in weights}) == 1
    )


def _is_small(weight: Tensor) -> bool:
    return (
        type(weight) in (Tensor, Parameter)
        and weight.dtype is torch.float32
        and weight.layout is torch.strided
        and weight.device.type in _DEVICES
        and 0 < weight.numel() <= LARGEST
    )


def _starts(sizes: Iterable[int]) -> Iterator[int]:
    """Where each slice starts, aligned, and where the last one ends."""
    start = 0
    for size in sizes:
        yield start
        start += -(-size // _ALIGNED) * _ALIGNED
    yield start


def _counts_owners() -> bool:
    """Whether Python's count of references to a tensor has one for what holds it in C++."""
    tensor, holder = torch.zeros(1, device="cpu"), torch.zeros(1, device="cpu")
    before = sys.getrefcount(tensor)
    holder.grad = tensor
    return sys.getrefcount(tensor) > before


_target = weakref.ref.__call__
_owners = None if _counts_owners() else getattr(Tensor, "_use_count", None)
_CAN_COUNT = _storage_count is not None and (_counts_owners() or _owners is not None)
