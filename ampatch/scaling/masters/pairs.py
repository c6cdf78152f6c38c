"""Half parameters and their masters, pair by pair; gradients down from the ones to the others."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Parameter

from ...torch_private import foreach
from ...torch_private.half_grads import raw_grad, set_raw_grad
from .comparison import Pair

_half_of = operator.attrgetter("half")
_master_of = operator.attrgetter("master")
_is_sparse = operator.attrgetter("is_sparse")
_SMALL_PART = 2**16  # elements: a quarter of a megabyte of FP32


class Pairs:
    """Those of one optimizer; `by_half` and `by_master` have them by an id, for reading."""

    def __init__(self) -> None:
        self.by_half: dict[int, Pair] = {}
        self.by_master: dict[int, Pair] = {}
        self._listed: tuple[list[Tensor], list[Tensor]] | None = None
        self._parts: list[list[Pair]] = []

    def __len__(self) -> int:
        return len(self.by_half)

    def __iter__(self) -> Iterator[Pair]:
        return iter(list(self.by_half.values()))

    def of(self, half: Tensor) -> Parameter | None:
        """The master of a half parameter, or None."""
        pair = self.by_half.get(id(half))
        return None if pair is None else pair.master

    def half_of(self, master: Tensor) -> Tensor | None:
        """The half parameter of a master, or None."""
        pair = self.by_master.get(id(master))
        return None if pair is None else pair.half

    def _forget_lists(self) -> None:
        self._parts.clear()
        self._listed = None

    def _lists(self) -> tuple[list[Tensor], list[Tensor]]:
        """Halves and masters, in the order of `by_half`."""
        if self._listed is None:
            pairs = self.by_half.values()
            self._listed = [pair.half for pair in pairs], [pair.master for pair in pairs]
        return self._listed

    def has_grads(self) -> bool:
        """Whether a backward pass has left gradients in half weights."""
        grads = map(raw_grad, self._lists()[0])
        return any(map(operator.is_not, grads, itertools.repeat(None)))

    def take_grads(self) -> tuple[list[Tensor], list[Tensor]]:
        """Move the gradients out of the half weights: masters, and their FP32 gradients.

        Some at a time, so that there are never two whole sets of them.
        """
        masters: list[Tensor] = []
        taken: list[Tensor] = []
        if not self._parts:
            self._parts = _in_parts(list(self.by_half.values()))
        for part in self._parts:
            grads = list(map(raw_grad, map(_half_of, part)))
            if any(map(operator.is_, grads, itertools.repeat(None))):
                part = [pair for pair in part if raw_grad(pair.half) is not None]
                grads = list(map(raw_grad, map(_half_of, part)))
            here = list(map(_master_of, part))
            if any(map(_is_sparse, grads)):
                taken += [grad.float() for grad in grads]
            elif grads:
                copies = list(map(torch.empty_like, here))
                foreach.copy_(copies, grads)
                taken += copies
            for pair in part:
                set_raw_grad(pair.half, None)
            masters += here
        return masters, taken

    def put_grads_back(self, masters: set[int] | None = None) -> None:
        """Move gradients of (these) masters, by their ids, to where autograd adds to them."""
        for half, master in self:
            if master.grad is not None and (masters is None or id(master) in masters):
                set_raw_grad(half, master.grad.to(half.dtype))
                master.grad = None

    def drop_grads(self) -> None:
        """Forget the gradients in the half weights."""
        for half in self._lists()[0]:
            set_raw_grad(half, None)


def _in_parts(pairs: list[Pair]) -> list[list[Pair]]:
    """Pairs in groups of about an eighth of all elements; small models in few groups."""
    limit = max(_SMALL_PART, sum(pair.half.numel() for pair in pairs) // 8)
    parts: list[list[Pair]] = []
    size = limit
    for pair in pairs:
        if size + pair.half.numel() > limit:
            parts.append([])
            size = 0
        parts[-1].append(pair)
        size += pair.half.numel()
    return parts
