"""O2: half copies of a model's FP32 weights, lent to its modules while a forward runs.

A weight exists once, in FP32, as the model's parameter, which is also what the optimizer holds.
When the outermost call of the model, or of a part of it, begins, half copies are put in the
parameters' places in `module._parameters`; when it ends, the parameters are put back.

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

import operator
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

from ..casting.batched_casts import are_split
from ..casting.calls import Call, here
from ..errors import AmpatchError
from ..log import logger
from ..torch_private.devices import has_values, is_captured
from ..torch_private.dtensors import local_of
from ..torch_private.modules import REPLICA, exchange_parametrized
from ..torch_private.probes import computes_with_fakes, is_recording
from ..torch_private.tensors import hooks_of
from .lent_places import (
    Place,
    StaysFloat,
    Tree,
    copies_of,
    entries_of,
    lent_of,
    parameter_tables,
    put_in_replica,
    put_in_traced,
    share_attributes,
)
from .lookups import Lookup
from .sharded_weights import sharded_parameters

lenders: weakref.WeakValueDictionary[int, LentWeights] = weakref.WeakValueDictionary()
"""By the ids of their models.  A lender holds its model, so the id stays the model's own."""

_version_of = operator.attrgetter("_version")


def lent_types(module: nn.Module) -> dict[int, torch.dtype]:
    """The dtypes of the half copies that models lend of a module's weights, by the weights' ids."""
    own, found = set(map(id, module.parameters())), {}
    for lender in list(lenders.values()):
        found.update(dict.fromkeys(own & lender.ids(), lender.dtype))
    return found


def parameter_behind(tensor: Tensor) -> Tensor | None:
    """The parameter that a lent copy stands in for; None for other tensors."""
    for lender in list(lenders.values()):
        for lending in list(lender.lendings):
            found = None if lending.half is None else lending.half.behind(tensor)
            if found is not None:
                return found
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


class HalfCopies:
    """Half copies of the parameters of a tree, and what was in them when that was last looked at.

    The values of a copy whose `.data` was read are noted: a write through that raises no version.
    """

    def __init__(self, lender: LentWeights, tree: Tree) -> None:
        self.lender = lender
        self.tree = tree
        self.parameters: list[Tensor] = []  # one for each of `copies`
        self.copies: list[Tensor] = []
        self._versions: list[int] = []
        self._values: dict[int, Tensor] = {}
        self._indices: dict[int, int] | None = None  # by ids of copies
        if tree.parameters:
            self.copies = copies_of(tree, lender.dtype, lender.model, lender.wants_own_nodes)
            lender.has_own_nodes = lender.wants_own_nodes
            self.parameters = list(tree.parameters)
            share_attributes(self.copies, tree.attributes)
            self._versions = list(map(_version_of, self.copies))

    def _index_of(self, copy: Tensor) -> int | None:
        if self._indices is None or len(self._indices) != len(self.copies):
            self._indices = {id(one): index for index, one in enumerate(self.copies)}
        return self._indices.get(id(copy))

    def behind(self, copy: Tensor) -> Tensor | None:
        """The parameter that a copy stands in for; None for other tensors."""
        index = self._index_of(copy)
        return None if index is None else self.parameters[index]

    def note_copy(self, parameter: Tensor, copy: Tensor) -> None:
        """A copy is made while the forward runs."""
        share_attributes([copy], [vars(parameter)])
        known = len(self.copies)  # after Ctrl-C the other lists may be longer
        self.parameters[known:] = [parameter]
        self._versions[known:] = [copy._version]
        self.copies.append(copy)

    def float_of(self, copy: Tensor) -> Tensor | None:
        """The FP32 weight that has the values of a copy; None if the forward wrote into that."""
        index = self._index_of(copy)
        if (
            index is None
            or copy._version != self._versions[index]
            or index in self._values
            or any(hooks_of(copy))
        ):
            return None
        return self.parameters[index]

    def note_values(self, copy: Tensor) -> None:
        """Have the values that a copy has now compared with those at the end of the call."""
        index = self._index_of(copy)
        if index is None or index in self._values:
            return
        if has_values(copy.device) and not is_captured(copy):
            self._values[index] = local_of(copy).detach().clone()

    def carry(self) -> None:
        """What was written into copies goes to the parameters."""
        now = list(map(_version_of, self.copies))
        if self._values or now != self._versions:
            values, self._values = self._values, {}
            versions, self._versions = self._versions, now
            model, writes = self.lender.model, self.lender.writes
            writes.carry(model, self.parameters, self.copies, versions, values)

    def lend_again(self, call: Call) -> None:
        """They are in place until `call` ends, for a recompute or a backward pass."""
        are_in_place = any(one.half is self and one.is_in_place for one in self.lender.lendings)
        call.lending = lending = Lending(self.lender)
        lending.tree, lending.half = self.tree, self
        if are_in_place:  # their forward runs, in this thread or in one that waits for this pass
            lending.is_in_place = lending.is_borrowed = True
            return
        self.lender.claim(lending)
        if self.tree.ids:
            lending.put(self, found=self.tree.found())
        else:
            lending.is_in_place = True


class Lending:
    """What one call has in the places of weights."""

    half: HalfCopies | None = None
    tree: Tree
    is_borrowed = False  # another call has them in place, and takes them back

    def __init__(self, lender: LentWeights) -> None:
        self.lender = lender
        self.is_lent = False  # some copies may be in place
        self.is_in_place = False  # all copies are
        self._found: list[Any] | None = None  # what lies under copies that are in place again
        self._parametrized: dict | None = None  # what `parametrize.cached()` has outside
        self._lookups: list[Lookup] = []

    def put(self, half: HalfCopies, found: list[Any] | None = None) -> None:
        """Put copies in their places; `found`: what is there, if that is not the parameters."""
        tree, self._found, self.is_lent = self.tree, found, True
        if tree.lookups:
            made = dict(zip(map(id, half.parameters), half.copies))
            for lookup in tree.lookups:
                self._lookups.append(lookup)
                lookup.put(self.lender.dtype, made.get(id(lookup.parameter)), self._note_copy)
        tree.put(half.copies)
        self._parametrized = exchange_parametrized({})
        self.is_in_place = True

    def _note_copy(self, parameter: Tensor, copy: Tensor) -> None:
        assert self.half is not None
        self.half.note_copy(parameter, copy)

    def end(self) -> None:
        """Take back what is lent.  May be called again."""
        lender, half, found = self.lender, self.half, self._found
        self.is_in_place = False
        try:
            if self.is_lent and half is not None:
                if found is None:
                    self.tree.put(self.tree.parameters, instead_of=half.copies)
                else:
                    self.tree.put_found(found)
                for lookup in self._lookups:
                    lookup.take_back(self._note_copy)
                if self._parametrized is not None:  # what it has made of FP32 parameters
                    exchange_parametrized(self._parametrized)
                self.is_lent = False
            if half is not None and half.copies and found is None and not self.is_borrowed:
                half.carry()
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
        self.writes = LentWrites()
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
        """The places of the model, or of a part of it, as they are now."""
        known = self._trees.get(id(root))
        if known is not None and known.is_valid():
            return known
        self._excluded_ids = sharded_parameters(self.model)
        tree = Tree(root, self._stays_float, self._excluded_ids)
        for call in here.stack:  # copies of another model may be in the places
            if call.lending is not None and call.lending.is_in_place:
                return tree
        if root is self.model:
            self._trees.clear()  # it may have lost submodules
        self._trees[id(root)] = tree
        if root is self.model:
            self.known = tree.ids
            self._at_change()
        return tree

    def ids(self) -> set[int]:
        """Ids of the weights of which the forward has half copies."""
        if not self.lendings:
            self.tree_of(self.model)
        return self.known

    def note_request(self, wanted: Collection[int]) -> bool:
        """As `LastForward.note_request`."""
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
        lending.half = half = HalfCopies(self, tree)
        if tree.ids:
            lending.put(half)
        else:  # at O3, and in FP32 parts
            lending.is_in_place = True

    def lend_traced(self, root: nn.Module) -> TracedPlaces | None:
        """As `lend`, while Dynamo traces: it guards on what it has read, so places are found anew.

        None: nothing is lent.
        """
        if not self.known:
            return None
        places = lent_of(entries_of(parameter_tables(root, self._stays_float)), self._excluded_ids)
        put_in_traced(places, self.dtype)
        return TracedPlaces(places)

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


class TracedPlaces:
    """What a call that Dynamo traces has exchanged for half copies."""

    def __init__(self, places: list[Place]) -> None:
        self._places = places

    def end(self) -> None:
        """The parameters are back."""
        for table, name, parameter in self._places:
            table[name] = parameter


def _forget_other_threads() -> None:
    """In the child of a fork, which has one thread; new ones may get the numbers of the others."""
    for lender in list(lenders.values()):
        if lender.thread.get("in") not in (None, get_ident()):
            lender.take_over()
            lender.thread.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)


class LentWrites:
    """Finds what a forward has written into the copies, and writes it into the weights."""

    def __init__(self) -> None:
        self._has_warned = False

    def carry(
        self,
        model: nn.Module,
        parameters: list[Tensor],
        copies: list[Tensor],
        versions: list[int],
        values: dict[int, Tensor],
    ) -> None:
        """Write into parameters what was written into copies that had these versions and values."""
        for parameter, copy, version in zip(parameters, copies, versions, strict=True):
            if copy._version != version:
                self._carry(model, copy, parameter)
        for index in _written_unseen(copies, values) if values else ():
            self._carry(model, copies[index], parameters[index])

    def _carry(self, model: nn.Module, copy: Tensor, parameter: Tensor) -> None:
        """Elements that were not written keep their FP32 values."""
        with torch.no_grad():
            same = parameter.to(copy.dtype) == copy
            parameter.copy_(torch.where(same, parameter, copy.to(parameter.dtype)))
        if not self._has_warned:
            self._has_warned = True
            names = [name for name, one in model.named_parameters() if one is parameter]
            logger.warning(
                "%s writes into its weights in its own forward (%s). At O2 it has half copies "
                "there: what is written is rounded to %s, and small changes, as of an average, are "
                "lost. Write outside of the forward, or keep that part in FP32: "
                'overrides={"name.*": "float"}.',
                type(model).__name__,
                names[0] if names else "a weight",
                copy.dtype,
            )


def _written_unseen(copies: list[Tensor], values: dict[int, Tensor]) -> list[int]:
    """Where copies differ from these values.  Waits once for the device."""
    home = next(iter(values.values())).device
    flags = [
        _differ(before, local_of(copies[index]).detach()).any().to(home)
        for index, before in values.items()
    ]
    return [index for index, flag in zip(values, torch.stack(flags).tolist()) if flag]


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Elementwise; a NaN equals any NaN."""
    return (one != other) & ~(one.isnan() & other.isnan())
