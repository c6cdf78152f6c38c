"""What one call is lent, and how that is put in place and taken back."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..casting.stack import calling_frame, is_running
from . import entries
from .lent_casts import LentCasts
from .lent_places import Tree
from .lent_writes import LentWrites


class Lender(Protocol):
    """Lends the weights of one model."""

    casts: LentCasts
    writes: LentWrites

    def part(self, root: nn.Module) -> Tree:
        """Where FP32 weights stand in a new part of the model."""

    def drop(self, lending: Lending) -> None:
        """End that call: it was interrupted."""

    def reserved(self) -> contextlib.AbstractContextManager[list[Any]]:
        """No other thread lends meanwhile; gives what is lent in this one."""


_version_of = operator.attrgetter("_version")


class Lending:
    """The half copies of one call, one for each parameter of `tree`."""

    def __init__(self, tree: Tree, owner: Lender, thread: threading.Thread) -> None:
        self.tree = tree
        self.thread = thread
        self.caller = calling_frame()  # if this frame runs no longer, the call was interrupted
        self.is_in_place = False
        self._owner = owner
        self._late: list[Lending] = []  # of parts that the forward has made
        self.copies = owner.casts.of(tree)
        # What is noted on a parameter (`p.lr_mult`) is read and written on its copy too.
        entries.share_attributes(self.copies, tree.attributes)
        self._versions = list(map(_version_of, self.copies))
        self._values: dict[int, Tensor] = {}
        if torch.is_grad_enabled() or owner.writes.compared:
            self._values = owner.writes.look(tree.parameters, self.copies)

    @functools.cached_property
    def behind(self) -> dict[int, Tensor]:
        """The parameters by the ids of their copies."""
        return dict(zip(map(id, self.copies), self.tree.parameters, strict=True))

    def lend_late(self, root: nn.Module) -> None:
        """The forward has put a new part into the model: from now on its weights are lent too."""
        late = Lending(self._owner.part(root), self._owner, self.thread)
        self._late.append(late)
        self.behind.update(late.behind)
        late.tree.put(late.copies)

    def take_back(self) -> None:
        """Put the parameters back; what the forward wrote into copies goes to them."""
        self.is_in_place = False
        for late in reversed(self._late):  # which the recompute of a checkpoint puts back
            late.take_back()
        parameters, copies = self.tree.parameters, self.copies
        self.tree.put(parameters, instead_of=copies)
        if self._values or list(map(_version_of, copies)) != self._versions:
            self._owner.writes.carry(parameters, copies, self._versions, self._values)

    def end_if_interrupted(self) -> None:
        """Take back what a call left that never ended: Ctrl-C skips hooks."""
        if not is_running(self.caller):
            self._owner.drop(self)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The copies are in place meanwhile: what the forward did is done once more."""
        if self.is_in_place:
            yield
            return
        with self._owner.reserved() as lent, contextlib.ExitStack() as stack:
            for one in (self, *self._late):
                stack.callback(one.tree.put_found, one.tree.found())
                one.tree.put(one.copies)
            self.is_in_place = True
            lent.append(self)  # what is called and noted here is as within the forward
            try:
                yield
            finally:
                lent.remove(self)
                self.is_in_place = False
