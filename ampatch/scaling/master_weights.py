"""FP32 master copies of half weights: gradients down to them, weights up from them.

The model keeps the half parameter, the optimizer gets the master.  Optimizers
without half parameters have an empty mapping here; there is no second code
path for "no master weights".
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import foreach
from ..surroundings import set_grad_enabled
from .ranks import world_size

_grad_of = operator.attrgetter("half.grad")
_master_of = operator.attrgetter("master")
_is_sparse = operator.attrgetter("is_sparse")
_version_of = operator.attrgetter("_version")
_SMALL_PART = 2**16  # elements: a quarter of a megabyte of FP32


class Pair(NamedTuple):
    """A half parameter of the model and its FP32 master."""

    half: Tensor
    master: Parameter


class MasterWeights:
    """The pairs of one optimizer; `by_half` and `by_master` have them by an id, for reading."""

    def __init__(self) -> None:
        self.by_half: dict[int, Pair] = {}
        self.by_master: dict[int, Pair] = {}
        self._versions: dict[int, int] = {}  # of half weights, as we last wrote or read them
        self._listed: tuple[list[Tensor], list[Tensor]] | None = None
        self._parts: list[list[Pair]] = []
        self._loaded: dict[int, int] = {}  # versions of half weights whose masters are known good
        self._settled = True

    def __len__(self) -> int:
        return len(self.by_half)

    def __iter__(self) -> Iterator[Pair]:
        return iter(list(self.by_half.values()))

    def add(
        self, half: Tensor, original: Tensor | None, master: Parameter | None = None
    ) -> Parameter:
        """Make the master of `half`, unless there is one already, and return it.

        It holds `original`, the FP32 values `half` was rounded from, where they
        are known, so that converting a model loses nothing.
        """
        if master is None:
            values = half.detach().float() if original is None else original
            master = Parameter(values, requires_grad=half.requires_grad)
        pair = Pair(half, master)
        self.by_half[id(half)] = self.by_master[id(master)] = pair
        self._parts.clear()
        self._listed = None
        self._versions[id(half)] = half._version
        self._settled = False
        return master

    def remove(self, half: Tensor) -> None:
        """Forget a pair; the tensors stay as they are."""
        pair = self.by_half.pop(id(half))
        self._parts.clear()
        self._listed = None
        del self.by_master[id(pair.master)], self._versions[id(half)]

    def of(self, half: Tensor) -> Parameter | None:
        """The master of a half parameter, or None."""
        pair = self.by_half.get(id(half))
        return None if pair is None else pair.master

    def current(self, half: Tensor) -> Parameter | None:
        """The master of a half parameter, what was written into the half taken over; or None."""
        pair = self.by_half.get(id(half))
        if pair is None:
            return None
        if not self._settled or half._version != self._versions[id(half)]:
            self._adopt([pair])
        return pair.master

    def load(self, half: Tensor, values: Tensor) -> None:
        """Take a master's values from a checkpoint, which is about to be copied into `half` too."""
        with torch.no_grad():
            self.by_half[id(half)].master.copy_(values)
        self._loaded[id(half)] = half._version + 1

    def agree(self, half: Tensor, send: Callable[[Tensor], None]) -> None:
        """Ranks have made `half` equal; `send` makes its master equal too, one rank's for all."""
        pair = self.by_half[id(half)]
        self._adopt([pair])
        send(pair.master.detach())
        self._loaded[id(half)] = half._version

    def half_of(self, master: Tensor) -> Tensor | None:
        """The half parameter of a master, or None."""
        pair = self.by_master.get(id(master))
        return None if pair is None else pair.half

    def settle(self) -> None:
        """Take over what was written into half weights from outside.

        Before the first use every pair is compared, since a DDP broadcast or a
        `.data` write may have come after `initialize`; later only weights whose
        version has moved.  Elements that still equal their master's rounding
        keep the master's precision.  With several ranks the first settling takes
        all values from the half weights, which somebody may have made equal, except
        those that `agree` made equal and those of a checkpoint loaded since.
        """
        if not self._settled and world_size() > 1:
            loaded = [p for p in self if self._loaded.get(id(p.half)) == p.half._version]
            known = {id(pair.half) for pair in loaded}
            changed = [pair for pair in self if id(pair.half) not in known]
            if changed:
                masters = [pair.master.detach() for pair in changed]
                foreach.copy_(masters, [pair.half.detach() for pair in changed])
            for pair in changed:
                self._versions[id(pair.half)] = pair.half._version
            self._adopt(loaded)
        elif not self._settled:
            self._adopt(list(self))
        elif list(map(_version_of, self._lists()[0])) != list(self._versions.values()):
            self._adopt([p for p in self if p.half._version != self._versions[id(p.half)]])
        self._settled = True
        self._loaded.clear()

    def _adopt(self, pairs: list[Pair]) -> None:
        with torch.no_grad():
            for half, master in pairs:
                same = half == master.to(half.dtype)
                if not half.is_meta and not bool(same.all()):
                    master.copy_(torch.where(same, master, half.to(master.dtype)))
                self._versions[id(half)] = half._version

    def has_grads(self) -> bool:
        """Whether a backward pass has left gradients in half weights."""
        for half in self._lists()[0]:
            if half.grad is not None:
                return True
        return False

    def take_grads(self) -> tuple[list[Tensor], list[Tensor]]:
        """Move the gradients out of the half weights: masters, and their FP32 gradients.

        Some at a time, so that there are never two whole sets of them.
        """
        masters: list[Tensor] = []
        taken: list[Tensor] = []
        if not self._parts:
            self._parts = _in_parts(list(self.by_half.values()))
        for part in self._parts:
            grads = list(map(_grad_of, part))
            if any(map(operator.is_, grads, itertools.repeat(None))):
                part = [pair for pair in part if pair.half.grad is not None]
                grads = list(map(_grad_of, part))
            here = list(map(_master_of, part))
            if any(map(_is_sparse, grads)):
                taken += [grad.float() for grad in grads]
            elif grads:
                copies = list(map(torch.empty_like, here))
                foreach.copy_(copies, grads)
                taken += copies
            for pair in part:
                pair.half.grad = None
            masters += here
        return masters, taken

    def drop_grads(self) -> None:
        """Forget the gradients in the half weights."""
        for half in self._lists()[0]:
            half.grad = None

    def push(self) -> None:
        """Round the masters into the half weights."""
        if not self.by_half:
            return
        halves, masters = self._lists()
        found = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            foreach.copy_(halves, masters)
        finally:
            set_grad_enabled(found)
        self._versions = dict(zip(self.by_half, map(_version_of, halves), strict=True))

    def _lists(self) -> tuple[list[Tensor], list[Tensor]]:
        """Halves and masters, in the order of `by_half`."""
        if self._listed is None:
            pairs = self.by_half.values()
            self._listed = [pair.half for pair in pairs], [pair.master for pair in pairs]
        return self._listed


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
