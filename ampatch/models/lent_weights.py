"""O2: half copies of a model's FP32 weights, lent to its modules while a forward runs.

A weight exists once, in FP32, as the model's parameter, which is also what the optimizer holds.
When the outermost call of the model, or of a part of it, begins, half copies are put in the
parameters' slots in `module._parameters`; when it ends, the parameters are put back.

Half copies (`HalfCopies`) are kept by nodes of the graph and by checkpoints.  A `Lending` has them
in place for one `Call`.  Its states:

    state      in `lendings`   `is_lent`   `is_in_place`   the tables hold     left by
    begun      yes             no          no              parameters          `put`, `end`
    lent       yes             yes         no              copies in part      `put`, `end`
    in place   yes             yes         yes             copies              `end`
    ended      no              no          no              parameters          nothing

An exception may strike between any two of them: `is_lent` is set before the first copy is put in
place and reset after the last parameter is back, and `end` may be called in each state, and again.
The tables are there for all threads, so those in `lendings` belong to one thread, and a forward in
another one is refused meanwhile.  At O3 there are no copies, and `is_lent` stays False.

FSDP2 (`MixedPrecisionPolicy`) treats unsharded parameters in this way.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from threading import get_ident
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..casting.calls import Call, here
from ..casting.half_copies import are_split
from ..errors import AmpatchError
from ..torch_private.modules import REPLICA, exchange_parametrized
from ..torch_private.probes import computes_with_fakes, is_recording
from .lent_places import (
    HalfCopies,
    LentWrites,
    Slot,
    StaysFloat,
    Tree,
    entries_of,
    lent_of,
    parameter_tables,
    put_in_replica,
    put_in_traced,
)
from .lookups import Lookup
from .sharded_weights import sharded_parameters

lenders: weakref.WeakValueDictionary[int, LentWeights] = weakref.WeakValueDictionary()
"""By the ids of their models.  A lender holds its model, so the id stays the model's own."""


def lent_types(module: nn.Module) -> dict[int, torch.dtype]:
    """The dtypes of the half copies that models lend of a module's weights, by the weights' ids."""
    own, dtypes = set(map(id, module.parameters())), {}
    for lender in list(lenders.values()):
        dtypes.update(dict.fromkeys(own & lender.ids(), lender.dtype))
    return dtypes


def parameter_behind(tensor: Tensor) -> Tensor | None:
    """The parameter that a lent copy stands in for; None for other tensors."""
    for lender in list(lenders.values()):
        for lending in list(lender.lendings):
            weight = None if lending.half is None else lending.half.behind(tensor)
            if weight is not None:
                return weight
    return None


def note_values(tensor: Tensor) -> None:
    """`tensor.data` is about to be read or set: if it is a lent copy, its lending notes that."""
    if is_dynamo_compiling() or is_recording() or computes_with_fakes():
        return
    for call in here.stack:
        if call.lending is not None and call.lending.is_in_place:
            call.lending.half.note_values(tensor)


def is_traced_by_fx(args: tuple, kwargs: dict) -> bool:
    """Whether torch.fx calls a module on proxies, to see what it does."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.fx.Proxy):
            return True
    return False


def lending_around(module: nn.Module) -> Lending | None:
    """What is lent to the innermost forward or recompute here that the module belongs to."""
    for call in reversed(here.stack):
        lending = call.lending
        if lending is not None and lending.is_in_place and id(module) in lending.tree.modules:
            return lending
    return None


class Lending:
    """What one call has in the slots of weights."""

    half: HalfCopies | None = None
    tree: Tree
    is_borrowed = False  # another call has them in place, and takes them back

    def __init__(self, lender: LentWeights) -> None:
        self.lender = lender
        self.is_lent = False  # some copies may be in place
        self.is_in_place = False  # all copies are
        self._covered: list[Any] | None = None  # what lies under copies that are in place again
        self._parametrized: dict | None = None  # what `parametrize.cached()` has outside
        self._lookups: list[Lookup] = []

    def put(self, half: HalfCopies, covered: list[Any] | None = None) -> None:
        """Put copies in their slots; `covered`: what is there, if that is not the parameters."""
        tree, self._covered, self.is_lent = self.tree, covered, True
        if tree.lookups:
            copies = dict(zip(map(id, half.parameters), half.copies))
            for lookup in tree.lookups:
                self._lookups.append(lookup)
                lookup.put(self.lender.dtype, copies.get(id(lookup.parameter)), self._note_copy)
        tree.put(half.copies)
        self._parametrized = exchange_parametrized({})
        self.is_in_place = True

    def lend_again(self, call: Call) -> None:
        """The same copies are in place until `call` ends, for a recompute or a backward pass."""
        lender, half, tree = self.lender, self.half, self.tree
        assert half is not None
        are_in_place = any(other.half is half and other.is_in_place for other in lender.lendings)
        call.lending = again = Lending(lender)
        again.tree, again.half = tree, half
        if are_in_place:  # their forward runs, in this thread or in one that waits for this pass
            again.is_in_place = again.is_borrowed = True
            return
        lender.claim(again)
        if tree.ids:
            again.put(half, covered=tree.present())
        else:
            again.is_in_place = True

    def _note_copy(self, parameter: Tensor, copy: Tensor) -> None:
        assert self.half is not None
        self.half.note_copy(parameter, copy)

    def end(self) -> None:
        """Take back what is lent.  May be called again."""
        lender, half, covered = self.lender, self.half, self._covered
        self.is_in_place = False
        try:
            if self.is_lent and half is not None:
                if covered is None:
                    self.tree.put(self.tree.parameters, instead_of=half.copies)
                else:
                    self.tree.put_each(covered)
                for lookup in self._lookups:
                    lookup.take_back(self._note_copy)
                if self._parametrized is not None:  # what it has made of FP32 parameters
                    exchange_parametrized(self._parametrized)
                self.is_lent = False
            if half is not None and half.copies and covered is None and not self.is_borrowed:
                half.carry(lender.writes)
        finally:
            if not self.is_lent:
                if self in lender.lendings:
                    lender.lendings.remove(self)
                if not lender.lendings and lender.thread.get("in") == get_ident():
                    lender.thread.clear()


class LentWeights:
    """Lends half copies, in `dtype`, of the FP32 weights of one model.

    Weights of modules for which `stays_float` is true are left out, and those that FSDP2 holds.
    `at_change()` is called when they open, and before a forward of a model that has got other
    parameters or parts.

    At O3 the weights are half: a lending without copies tells which modules the forward is of.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        stays_float: StaysFloat,
        at_change: Callable[[], object],
    ) -> None:
        self.model = model
        self.dtype = dtype
        self._stays_float = stays_float
        self._excluded_ids: Collection[int] = ()
        self._at_change = at_change
        self._trees: dict[int, Tree] = {}  # by the ids of their roots, which they hold
        self.wants_own_nodes = False  # one for each weight
        self.has_own_nodes = False  # the last forward made them
        self.known: set[int] = set()  # ids of the weights of the whole model, when last looked at
        self.writes = LentWrites(model)
        self.lendings: list[Lending] = []  # the innermost last
        self.thread: dict[str, int] = {}  # that of `lendings`: an entry, which one thread can make

    def open(self) -> None:
        """Forwards of the model lend copies of what is FP32 now, until `close`."""
        lenders[id(self.model)] = self
        self._trees.clear()
        self.tree_of(self.model)

    def close(self) -> None:
        """Nothing is lent any more."""
        self._end_all()
        self._trees.clear()
        if lenders.get(id(self.model)) is self:
            del lenders[id(self.model)]

    def _end_all(self) -> None:
        for lending in reversed(list(self.lendings)):
            lending.end()

    def tree_of(self, root: nn.Module) -> Tree:
        """The slots of the model, or of a part of it, as they are now."""
        known = self._trees.get(id(root))
        if known is not None and known.is_valid():
            return known
        self._excluded_ids = sharded_parameters(self.model)
        tree = Tree(root, self.model, self._stays_float, self._excluded_ids)
        for call in here.stack:  # copies of another model may be in the slots
            if call.lending is not None and call.lending.is_in_place:
                return tree
        self._trees[id(root)] = tree
        if root is self.model:
            self._trees = {id(root): tree}  # without those of former submodules
            self.known = tree.ids
            self._at_change()
        return tree

    def ids(self) -> set[int]:
        """Ids of the weights of which the forward has half copies."""
        if not self.lendings:
            self.tree_of(self.model)
        return self.known

    def note_request(self, wanted: Collection[int]) -> bool:
        """As `WeightUseOrder.record_request`."""
        if self.has_own_nodes:
            return False
        trees = list(self._trees.values())
        is_split = any(are_split(tree.parameters, wanted) for tree in trees)
        self.wants_own_nodes |= is_split
        return is_split

    # Around a call

    def lend(self, call: Call, root: nn.Module) -> None:
        """`call` is one of the model, or of a part of it: until it ends, copies are in place."""
        if REPLICA in vars(root):
            put_in_replica(self.model, root, self.dtype, self._stays_float)
            return
        call.lending = lending = Lending(self)
        self.claim(lending)
        lending.tree = tree = self.tree_of(root)
        lending.half = half = HalfCopies(tree, self.dtype, self.wants_own_nodes)
        self.has_own_nodes = self.wants_own_nodes
        if tree.ids:
            lending.put(half)
        else:  # at O3, and in FP32 parts
            lending.is_in_place = True

    def lend_traced(self, root: nn.Module) -> TracedSlots | None:
        """As `lend`, while Dynamo traces: it guards on what it has read, so slots are found anew.

        None: nothing is lent.
        """
        if not self.known:
            return None
        slots = lent_of(entries_of(parameter_tables(root, self._stays_float)), self._excluded_ids)
        put_in_traced(slots, self.dtype)
        return TracedSlots(slots)

    def claim(self, lending: Lending) -> None:
        """A forward begins, or what repeats it, in this thread.

        Raises `AmpatchError` while another thread is in one: they share the modules' tables.
        """
        this = get_ident()
        other = self.thread.setdefault("in", this)
        if other != this:
            if other in sys._current_frames():
                raise AmpatchError(self._refusal())
            self.take_over()
        self.lendings.append(lending)

    def take_over(self) -> None:
        """The thread of the lendings is no more: this is theirs now, and has none."""
        self._end_all()
        self.thread["in"] = get_ident()

    def _refusal(self) -> str:
        name = type(self.model).__name__
        return (
            f"{name}: a forward, or a part of one, begins in thread "
            f"{threading.current_thread().name!r} while one of the same model runs in another "
            "thread. At O2 and O3 a model serves one thread at a time. Give each thread a model of "
            'its own, copy.deepcopy(model), or take opt_level="O1", which threads may share. '
            "Submodules may be computed in threads within a forward of the whole model."
        )


class TracedSlots:
    """What a call that Dynamo traces has exchanged for half copies."""

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots

    def end(self) -> None:
        """The parameters are back."""
        for table, name, parameter in self._slots:
            table[name] = parameter


def _forget_other_threads() -> None:
    """In the child of a fork, which has one thread; new ones may get the numbers of the others."""
    for lender in list(lenders.values()):
        if lender.thread.get("in") not in (None, get_ident()):
            lender.take_over()
            lender.thread.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)
