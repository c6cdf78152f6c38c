"""O2: half copies of a model's FP32 weights, lent to its modules while a forward runs.

A weight exists once, in FP32, as the model's parameter, which is also what the optimizer holds.
When the outermost call of the model, or of a part of it, begins, half copies are put in the
parameters' places in `module._parameters`; when it ends, the parameters are put back.

An exception may strike anywhere, and Ctrl-C skips hooks.  So a lending is noted before its copies
are put in place, and forgotten after the parameters are back.  A lending whose call runs no longer
is ended by the next call, by the next step, by `load_state_dict` and by `deactivate`.

FSDP2 (`MixedPrecisionPolicy`) treats unsharded parameters in this way.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..casting.cast_state import CastState
from ..casting.stack import calling_frame, is_running
from ..errors import AmpatchError
from ..torch_private.devices import has_values, is_captured
from ..torch_private.dtensors import local_of
from ..torch_private.modules import REPLICA, exchange_parametrized
from ..torch_private.probes import computes_with_fakes, is_recording
from ..torch_private.tensors import hooks_of
from .lent_copies import copies_of, put_in_replica, put_in_traced
from .lent_places import (
    Place,
    StaysFloat,
    Tree,
    entries_of,
    lent_of,
    parameter_tables,
    share_attributes,
)
from .lent_writes import LentWrites
from .lookups import Lookup
from .sharded_weights import sharded_parameters

PATIENCE = 300.0
"""Seconds that a forward waits for one of the same model in another thread."""

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
            found = lending.behind(tensor)
            if found is not None:
                return found
    return None


def note_values(tensor: Tensor, state: CastState) -> None:
    """`tensor.data` is about to be read or set: if it is a lent copy, its lending notes that."""
    if is_dynamo_compiling() or is_recording() or computes_with_fakes():
        return
    for lending in state.thread.lent:
        if lending.is_in_place and lending.behind(tensor) is not None:
            lending.note_values(tensor)


def dtype_around(state: CastState) -> torch.dtype | None:
    """What the innermost forward of a half model in this thread computes in; None without one."""
    for lending in reversed(state.thread.lent):
        if lending.is_in_place:
            return lending.owner.computes_in()
    return None


class Lending:
    """Half copies for one call, one for each parameter of `tree`, and whether they are in place.

    `roots` are the modules whose calls compute with them, the outermost first; none in a recompute.
    """

    tree: Tree

    def __init__(self, owner: LentWeights, root: nn.Module) -> None:
        self.owner = owner
        self.roots = [root]
        # If this frame runs no longer, the call was interrupted.
        self.caller: FrameType | None = calling_frame()
        self.is_lent = False  # some copies may be in place
        self.is_in_place = False  # all copies are
        self._parametrized: dict | None = None  # what `parametrize.cached()` has outside
        self.parameters: list[Tensor] = []  # those that have `copies`
        self.copies: list[Tensor] = []
        self._versions: list[int] = []
        self._values: dict[int, Tensor] = {}
        self._lookups: list[Lookup] = []

    def lend(self, tree: Tree) -> None:
        """Make copies of the parameters of `tree`, and put them in their places."""
        owner, self.tree = self.owner, tree
        if tree.parameters:
            self.copies, self.parameters = (
                copies_of(tree, owner.dtype, owner.model),
                list(tree.parameters),
            )
            share_attributes(self.copies, tree.attributes)
            self._versions = list(map(_version_of, self.copies))
        self._put()

    @functools.cached_property
    def _indices(self) -> dict[int, int]:
        """Where each copy is in the lists, by its id."""
        return {id(copy): index for index, copy in enumerate(self.copies)}

    def behind(self, copy: Tensor) -> Tensor | None:
        """The parameter that a copy stands in for; None for other tensors."""
        index = self._indices.get(id(copy))
        return None if index is None else self.parameters[index]

    def _note_copy(self, parameter: Tensor, copy: Tensor) -> None:
        """A copy is made while the forward runs."""
        share_attributes([copy], [vars(parameter)])
        self.parameters.append(parameter)
        self._versions.append(copy._version)
        self.copies.append(copy)
        self._indices[id(copy)] = len(self.copies) - 1

    def float_of(self, copy: Tensor) -> Tensor | None:
        """The FP32 weight that has the values of a copy; None if the forward wrote into that."""
        index = self._indices.get(id(copy))
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
        index = self._indices[id(copy)]
        if index not in self._values and has_values(copy.device) and not is_captured(copy):
            self._values[index] = local_of(copy).detach().clone()

    def _put(self) -> None:
        """Put the copies in their places.  That they are lent is noted before."""
        self.owner.state.thread.lent.append(self)
        self.owner.lendings.append(self)
        if self.tree.ids:
            self.is_lent = True
            if self.tree.lookups:
                self._put_lookups()
            self.tree.put(self.copies)
            self._parametrized = exchange_parametrized({})
        self.is_in_place = True

    def _put_lookups(self) -> None:
        made = dict(zip(map(id, self.parameters), self.copies))
        for lookup in self.tree.lookups:
            self._lookups.append(lookup)
            lookup.put(self.owner.dtype, made.get(id(lookup.parameter)), self._note_copy)

    def _take_lookups_back(self) -> None:
        for lookup in self._lookups:
            lookup.take_back(self._note_copy)
        self._lookups = []

    def end(self) -> None:
        """Take back what is lent, also to a call that was interrupted.  May be called again."""
        self.roots.clear()
        self.is_in_place = False
        try:
            if self.is_lent:
                self.tree.put(self.tree.parameters, instead_of=self.copies)
                self._take_lookups_back()
                if self._parametrized is not None:
                    self._put_parametrized_back()
                self.is_lent = False
            if self._versions:
                now = list(map(_version_of, self.copies))
                if self._values or now != self._versions:
                    self._carry(now)
        finally:
            if not self.is_lent:
                self.owner.forget(self)

    def _put_parametrized_back(self) -> None:
        """`parametrize.cached()` goes on with the weights that it made of FP32 parameters."""
        found, self._parametrized = self._parametrized, None
        if found is not None:
            exchange_parametrized(found)

    def _carry(self, now: list[int]) -> None:
        """What the forward wrote into copies, which have these versions now, goes to parameters."""
        values, self._values = self._values, {}
        versions, self._versions = self._versions, now
        self.owner.writes.carry(self.parameters, self.copies, versions, values)

    def end_if_interrupted(self) -> None:
        """Take back what a call left that never ended: Ctrl-C skips hooks."""
        if not is_running(self.caller):
            self.end()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Context manager: the copies are in place again, for a recompute or a backward pass."""
        if self.is_in_place and self in self.owner.here():
            yield
            return
        found: list[Any] | None = None
        try:
            if self.tree.ids:
                self.owner.take_turn()
            self.caller = calling_frame()
            found = self.tree.found()
            self._put()
            yield
        finally:
            self.is_in_place = False
            if found is not None:
                self.tree.put_found(found)
                self._take_lookups_back()
            self._put_parametrized_back()
            self.is_lent = False
            self.owner.forget(self)


class LentWeights:
    """Lends half copies, in `dtype`, of the FP32 weights of one model.

    Weights of modules for which `stays_float` is true are left out, and those that FSDP2 holds.
    `at_change()` is called before a forward of a model that has got other parameters or parts.
    `computes_in()` is the dtype of the part of the forward that runs now.

    At O3 the weights are half: a lending without copies notes that the forward runs.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        stays_float: StaysFloat,
        state: CastState,
        *,
        at_change: Callable[[], object],
        computes_in: Callable[[], torch.dtype],
    ) -> None:
        self.model = model
        self.dtype = dtype
        self._stays_float = stays_float
        self._excluded_ids: Collection[int] = ()
        self.state = state
        self._at_change = at_change
        self.computes_in = computes_in
        self._trees: dict[int, Tree] = {}  # by the ids of their roots, which they hold
        self.known: set[int] = set()  # ids of the weights of the whole model, when last looked at
        self.writes = LentWrites(model)
        # Of this model, in all threads.  `state.thread.lent` has those of all models in one thread.
        self.lendings: list[Lending] = []
        self._forward_lock = threading.RLock()
        # What calls that Dynamo traces have exchanged, the outermost first.
        self.traced: list[tuple[nn.Module, list[Place]]] = []

    def open(self) -> None:
        """Forwards of the model lend copies of what is FP32 now, until `close`."""
        lenders[id(self.model)] = self
        self._trees.clear()
        self._tree_of(self.model)

    def close(self) -> None:
        """Nothing is lent any more."""
        for lending in list(self.lendings):
            lending.end()
        self._trees.clear()
        if lenders.get(id(self.model)) is self:
            del lenders[id(self.model)]

    # Where the weights are

    def _tree_of(self, root: nn.Module) -> Tree:
        """The places of the model, or of a part of it, as they are now."""
        known = self._trees.get(id(root))
        if known is not None and known.is_valid():
            return known
        self._excluded_ids = sharded_parameters(self.model)
        tree = Tree(root, self._stays_float, self._excluded_ids)
        if not self.state.thread.lent:  # else copies of another model may be in the places
            self._trees[id(root)] = tree
            if root is self.model:
                self.known = tree.ids
                if known is not None:
                    self._at_change()
        return tree

    def ids(self) -> set[int]:
        """Ids of the weights of which the forward has half copies."""
        if not self.lendings:
            self._tree_of(self.model)
        return self.known

    # Around a call

    def begin(self, root: nn.Module, is_traced: bool) -> None:
        """A call of the model or of a part of it begins; the outermost one lends.

        `is_traced`: by Dynamo, which guards on what it has read: places are found anew.
        """
        if is_traced:
            if self.known:
                tables = parameter_tables(root, self._stays_float)
                places = lent_of(entries_of(tables), self._excluded_ids)
                put_in_traced(places, self.dtype)
                self.traced.append((root, places))
            return
        if REPLICA in vars(root):
            put_in_replica(self.model, root, self.dtype, self._stays_float)
            return
        if self.state.thread.lent:
            self.state.end_interrupted()
            for lending in self.here():
                if lending.roots and id(root) in lending.tree.modules:
                    lending.roots.append(root)
                    return
        lending = Lending(self, root)
        try:
            if self.known:
                self.take_turn()
            lending.lend(self._tree_of(root))
        except BaseException:
            lending.end()
            raise

    def end(self, root: nn.Module, is_traced: bool) -> None:
        """A call has ended."""
        if is_traced:
            if self.traced:
                for table, name, parameter in self.traced.pop()[1]:
                    table[name] = parameter
            return
        for lending in reversed(self.state.thread.lent):
            if lending.owner is self and lending.is_in_place and root in lending.roots:
                while lending.roots.pop() is not root:
                    pass
                if not lending.roots:
                    lending.end()
                return

    def here(self) -> Iterator[Lending]:
        """The lendings of this model that are in place in this thread, the innermost first."""
        lent = reversed(self.state.thread.lent)
        return (one for one in lent if one.is_in_place and one.owner is self)

    def take_turn(self) -> None:
        """Take the lock of the model's tables, which all threads share.

        Forwards of one model in several threads wait here for each other.
        """
        if not self._forward_lock.acquire(timeout=PATIENCE):
            raise AmpatchError(
                f"{type(self.model).__name__}: a forward in thread "
                f"{threading.current_thread().name!r} has waited {PATIENCE:g} seconds for one in "
                "another thread, which does not end: at O2 the forwards of one model in several "
                "threads take turns. Call the model in one thread, or a copy.deepcopy of it in "
                "each."
            )

    def forget(self, lending: Lending) -> None:
        """A lending has ended: the parameters are back.

        The list of the thread loses it last: after Ctrl-C before that, the next call ends it again.
        """
        lent = self.state.thread.lent
        if lending in self.lendings:
            self.lendings.remove(lending)
        if self.known:
            try:  # while nothing is lent this thread has no reason to hold it, however often
                while not self.lendings:
                    self._forward_lock.release()
            except RuntimeError:  # it is not this thread's, or no longer
                pass
        if lending in lent:
            lent.remove(lending)
        lending.caller = None  # a frame keeps what the call had; nodes may keep the lending

    def is_joined(self, module: nn.Module) -> bool:
        """Whether the model is a part of another one whose forward runs in this thread.

        Then that one casts inputs and outputs.
        """
        key = id(module)
        for lending in self.state.thread.lent:
            if lending.owner is not self and lending.is_in_place and key in lending.tree.modules:
                return True
        return False

    def runs(self, part: nn.Module) -> bool:
        """Whether a forward, or a recompute, runs in this thread that the part belongs to.

        That is the model's own, or that of a model which shares the part.
        """
        key, lent = id(part), self.state.thread.lent
        return any(one.is_in_place and key in one.tree.modules for one in lent)

    def is_inside(self, part: nn.Module) -> bool:
        """As `runs`, where a call of the part begins."""
        if not self.runs(part):
            return False
        roots = self._roots_here()
        if roots and roots[-1] is part:  # it calls itself
            roots.append(part)
        return True

    def is_end_of(self, part: nn.Module, is_traced: bool) -> bool:
        """Whether a call of a part from outside ends."""
        if is_traced:
            return len(self.traced) > 0 and self.traced[-1][0] is part
        roots = self._roots_here()
        if not roots or roots[-1] is not part:
            return False
        if len(roots) > 1:
            roots.pop()
            return False
        return True

    def _roots_here(self) -> list[nn.Module]:
        """The modules whose calls compute with the copies that are in place in this thread."""
        return next((lending.roots for lending in self.here() if lending.roots), [])
