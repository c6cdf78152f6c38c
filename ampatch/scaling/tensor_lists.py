"""Questions about whole lists of tensors, and gradients moved between them, in one call each.

Each function is here in Python; where the native part is in force, its twin of the same name is
called.  "Raw" gradients are where autograd leaves them: a half weight with a master shows another
one as `.grad`.
"""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from ..native import part
from ..torch_private import foreach
from ..torch_private.dtensors import (
    any_dtensor,
    are_laid_out_alike,
    is_dtensor,
    local_of,
    note_write,
)
from ..torch_private.half_grads import raw_grad, set_raw_grad
from ..torch_private.probes import set_grad_enabled

HALF_TYPES = frozenset((torch.float16, torch.bfloat16))
_PART = 2**16  # elements: a quarter of a megabyte of FP32
_dtype_of = operator.attrgetter("dtype")
_grad_of = operator.attrgetter("grad")
_is_sparse = operator.attrgetter("is_sparse")
_version_of = operator.attrgetter("_version")
_nothing = itertools.repeat(None)


def _any_half(tensors: Sequence[Tensor]) -> bool:
    """Whether one of them is of a half type."""
    return not HALF_TYPES.isdisjoint(map(_dtype_of, tensors))


def _with_grads(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those that have a gradient."""
    has_one = map(operator.is_not, map(_grad_of, tensors), _nothing)
    return list(itertools.compress(tensors, has_one))


def _grads_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of those that have one."""
    return [grad for grad in map(_grad_of, tensors) if grad is not None]


def _drop_grads(tensors: Sequence[Tensor]) -> None:
    """Set `.grad` of each to None."""
    for tensor in tensors:
        tensor.grad = None


def _any_raw_grad(tensors: Sequence[Tensor]) -> bool:
    """Whether one of them has a raw gradient."""
    return any(map(operator.is_not, map(raw_grad, tensors), _nothing))


def _drop_raw_grads(tensors: Sequence[Tensor]) -> None:
    """Drop the raw gradient of each."""
    collections.deque(map(set_raw_grad, tensors, _nothing), maxlen=0)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """The version of each."""
    return list(map(_version_of, tensors))


def _places(tensors: Sequence[Tensor]) -> list[int]:
    """Where the data of each lies."""
    return list(map(Tensor.data_ptr, tensors))


any_half = _any_half if part is None else part.any_half
with_grads = _with_grads if part is None else part.with_grads
grads_of = _grads_of if part is None else part.grads_of
drop_grads = _drop_grads if part is None else part.drop_grads
any_raw_grad = _any_raw_grad if part is None else part.any_raw_grad
drop_raw_grads = _drop_raw_grads if part is None else part.drop_raw_grads
versions = _versions if part is None else part.versions
places = _places if part is None else part.places


def take_up(halves: list[Tensor], masters: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Move the raw gradients out of half weights: masters, and their gradients, now FP32.

    Some at a time, so that there are never two whole sets of them.
    """
    found = None if part is None else part.take_up(halves, masters)
    return _take_up(halves, masters) if found is None else found


def _take_up(halves: list[Tensor], masters: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    grads = list(map(raw_grad, halves))
    if not all(map(operator.is_not, grads, _nothing)):
        has_one = list(map(operator.is_not, grads, _nothing))
        halves = list(itertools.compress(halves, has_one))
        masters = list(itertools.compress(masters, has_one))
        grads = list(itertools.compress(grads, has_one))
    wide: list[Tensor] = []
    for begin, end in _parts(grads):
        some = grads[begin:end]
        grads[begin:end] = [None] * len(some)
        if any(map(_is_sparse, some)) or any_dtensor(some):  # a DTensor keeps its own placements
            wide += [grad.float() for grad in some]
        else:
            copies = list(map(torch.empty_like, masters[begin:end]))
            foreach.copy_(copies, some)
            wide += copies
        drop_raw_grads(halves[begin:end])
    return masters, wide


def _parts(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Begin and end of parts of a list, each of about an eighth of all elements, or more."""
    sizes = list(itertools.accumulate(map(Tensor.numel, tensors)))
    if not sizes:
        return []
    if sizes[-1] <= _PART:
        return [(0, len(sizes))]
    limit = max(_PART, sizes[-1] // 8)
    parts, begin, full = [], 0, limit
    for end, size in enumerate(sizes, 1):
        if size >= full or end == len(sizes):
            parts.append((begin, end))
            begin, full = end, size + limit
    return parts


def add_to(tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Add gradients to those that tensors have."""
    held: list[Tensor] = []
    more: list[Tensor] = []
    for tensor, grad in zip(tensors, grads, strict=True):
        found = tensor.grad
        if found is None:
            tensor.grad = grad
        elif _takes_in_place(found, grad):
            held.append(local_of(found))
            more.append(local_of(grad))
        else:
            tensor.grad = found + grad
    if held:
        foreach.add_(held, more)


def put_back(aside: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give tensors the gradients that were set aside, with those added that they have now."""
    held: list[Tensor] = []
    more: list[Tensor] = []
    for tensor, grad in aside:
        new = tensor.grad
        if new is None:
            tensor.grad = grad
        elif _takes_in_place(grad, new):
            held.append(local_of(grad))
            more.append(local_of(new))
            tensor.grad = grad
        else:
            tensor.grad = grad + new
    if held:
        foreach.add_(held, more)


def _takes_in_place(grad: Tensor, more: Tensor) -> bool:
    """Whether torch's lists can add `more` to a gradient: not to one that is conjugated lazily."""
    return are_laid_out_alike(grad, more) and not grad.is_conj()


def round_down(halves: list[Tensor], masters: list[Tensor]) -> None:
    """Write the values of masters, rounded, into half weights."""
    if part is not None and part.round_down(halves, masters):
        return
    given = halves
    are_split = any_dtensor(masters)
    if are_split:
        halves, masters = list(map(local_of, halves)), list(map(local_of, masters))
    found = torch.is_grad_enabled()
    set_grad_enabled(False)
    try:
        foreach.copy_(halves, masters)
    finally:
        set_grad_enabled(found)
    if are_split:
        note_write(filter(is_dtensor, given))
