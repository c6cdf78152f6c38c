"""O2: half copies of a model's FP32 weights, lent to its modules while a forward runs.

A weight exists once, in FP32, as the model's parameter, which is also what the optimizer holds.
When the outermost call of the model, or of a part of it, begins, half copies are put in the
parameters' places in `module._parameters`; when it ends, the parameters are put back.  One node of
the graph casts many weights (`casting/batched_casts`), so that gradients reach `parameter.grad`
in FP32 through the parameters' own accumulators.

The nodes are made before the forward, and autograd runs ready nodes by the order in which they were
made: they would run at the very end of the pass, and all half gradients would wait for them.  So
they get a high sequence number, with which each runs as soon as its gradients are there.

An exception may strike anywhere (Ctrl-C skips hooks).  So what is lent is noted before it is put in
place, and forgotten after the parameters are back: whatever is still noted of a call that runs no
longer is taken back by the next one, at the next step, by `state_dict` and `deactivate`.

FSDP2 (`MixedPrecisionPolicy`) treats unsharded parameters in this way.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ..casting.batched_casts import (
    are_alike,
    cast_in_graph,
    cast_in_one_block,
    cast_together,
    may_share_node,
    may_use_all,
)
from ..casting.cast_state import CastState
from ..casting.kept_copies import KeptCopies
from ..casting.stack import calling_frame, is_running
from ..errors import AmpatchError
from ..torch_private.modules import (
    REPLICA,
    exchange_parametrized,
    list_weights,
    register_load_hook,
    register_state_dict_hook,
)
from ..torch_private.nodes import run_when_ready
from ..torch_private.probes import is_recording
from .hooks import Hook
from .lent_places import Place, StaysFloat, Tree, all_places, lent_of
from .lent_writes import LentWrites

PATIENCE = 300.0
"""Seconds that a forward waits for one of the same model in another thread."""

lenders: weakref.WeakValueDictionary[int, LentWeights] = weakref.WeakValueDictionary()
"""By the ids of their models, which they hold."""

_registration_hooks: list[Any] = []  # of torch's, while there are lenders
_version_of = operator.attrgetter("_version")


def lent_as(weight: Any) -> torch.dtype | None:
    """The type of the copies of a weight that some model lends; None of anything else."""
    return next((one.dtype for one in list(lenders.values()) if one.lends(weight)), None)


def lent_in(model: nn.Module) -> set[int]:
    """Ids of the parameters of a model that other models lend."""
    own, found = set(map(id, model.parameters())), set()
    for lender in list(lenders.values()):
        found |= own & (lender.ids() if lender.has_changed else lender.known)
    return found


def parameter_behind(tensor: Tensor) -> Tensor | None:
    """The parameter that a lent copy stands in for; None for other tensors."""
    for lender in list(lenders.values()):
        for lending in list(lender.lendings):
            found = lending.behind.get(id(tensor))
            if found is not None:
                return found
    return None


def dtype_around(state: CastState) -> torch.dtype | None:
    """What the forward computes in that goes on in this thread; None: no half model's does."""
    for lending in reversed(state.thread.lent):
        if lending.is_in_place:
            return lending.owner.computes_in()
    return None


def _parameter_at(table: dict[str, Any], name: str) -> Tensor | None:
    """The parameter of a place, whichever forward begins or ends in another thread meanwhile."""
    while True:
        entry = table.get(name)
        parameter = None if entry is None else parameter_behind(entry)
        if parameter is not None or table.get(name) is entry:
            return entry if parameter is None else parameter


def _note_registration(module: nn.Module, name: str, value: Any) -> Any:
    """A module gets a parameter or a submodule, perhaps in a forward of the model that it is in.

    Returns what torch is to put there instead.
    """
    for lender in list(lenders.values()):
        copy = lender.note_registration(module, name, value)
        if copy is not None:
            return copy
    return None


def _watch_registrations() -> None:
    """Have torch tell of registrations while there are lenders."""
    one = next(iter(lenders.values()), None)  # the length may count one that has just died
    are_there = one is not None
    if are_there and not _registration_hooks:
        _registration_hooks.append(register_module_parameter_registration_hook(_note_registration))
        _registration_hooks.append(register_module_module_registration_hook(_note_registration))
    while _registration_hooks and not are_there:
        _registration_hooks.pop().remove()


def _frame_around() -> FrameType | None:
    """The innermost frame that is neither of ampatch nor of `contextlib`."""
    frame = calling_frame()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return frame


_BETWEEN = (__name__.partition(".")[0] + ".", "contextlib")


class Lending:
    """Half copies of one call, one for each parameter of `tree`, and whether they are lent.

    `roots` are the calls that compute with them, the outermost first; none in a recompute.
    """

    def __init__(self, owner: LentWeights, tree: Tree, *roots: nn.Module) -> None:
        self.owner = owner
        self.tree = tree
        self.roots = list(roots)
        self.thread = threading.get_ident()
        # If this frame runs no longer, the call was interrupted.
        self.caller: FrameType | None = calling_frame()
        self.is_lent = False  # copies may be in places
        self.is_in_place = False  # all are
        self.is_repeated = False  # in a recompute
        self._is_in_graph = torch.is_grad_enabled()
        self._late: list[Lending] = []  # of parts that the forward has made
        self._parametrized: dict | None = None  # what `parametrize.cached()` has outside
        self.copies = owner.copies_of(tree)
        tree.share_attributes(self.copies)
        self._versions = list(map(_version_of, self.copies))
        self._values: dict[int, Tensor] = {}
        if self.copies:
            self._values = owner.writes.look(tree, self.copies)

    @functools.cached_property
    def behind(self) -> dict[int, Tensor]:
        """The parameters by the ids of their copies."""
        return dict(zip(map(id, self.copies), self.tree.parameters, strict=True))

    def has(self, module: nn.Module) -> bool:
        """Whether these are copies of the module's weights."""
        return any(id(module) in one.tree.modules for one in (self, *self._late))

    def lend_late(self, tree: Tree) -> list[Tensor]:
        """The forward has made a part or a parameter: its weights are lent from now on, too."""
        with torch.set_grad_enabled(self._is_in_graph):
            late = Lending(self.owner, tree)
        self.behind.update(late.behind)
        self._late.append(late)
        late.put()
        return late.copies

    def put(self) -> None:
        """Put the copies in their places."""
        self.is_lent = True
        for one in (self, *self._late):
            one.tree.put(one.copies)
        if self.copies:
            self._parametrized = exchange_parametrized({})
        self.is_in_place = True

    def take_back(self) -> None:
        """Put the parameters back where copies are.  May be called again."""
        self.is_in_place = False
        for late in reversed(self._late):
            late.take_back()
        self.tree.put(self.tree.parameters, instead_of=self.copies)
        if self._parametrized is not None:
            self._put_parametrized_back()
        self.is_lent = False

    def _put_parametrized_back(self) -> None:
        """Weights of FP32 parameters are not those of half copies."""
        found, self._parametrized = self._parametrized, None
        if found is not None:
            exchange_parametrized(found)

    def carry(self) -> None:
        """What the forward wrote into copies goes to the parameters."""
        for late in reversed(self._late):
            late.carry()
        now = list(map(_version_of, self.copies))
        if self._values or now != self._versions:
            values, self._values = self._values, {}
            versions, self._versions = self._versions, now
            self.owner.writes.carry(self.tree.parameters, self.copies, versions, values)

    def end_if_interrupted(self) -> None:
        """Take back what a call left that never ended: Ctrl-C skips hooks."""
        if not is_running(self.caller):
            self.owner.take_back(self)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The copies are in place meanwhile: what the forward did is done once more."""
        if self.is_in_place and self.thread == threading.get_ident():
            yield
            return
        lendings = (self, *self._late)
        found: list[list[Any]] = []
        self.is_repeated = True
        try:
            if self.tree.parameters:
                self.owner.take_turn()
            self.thread, self.caller = threading.get_ident(), _frame_around()
            self.owner.note(self)  # what is called and noted here is as within the forward
            found += [one.tree.found() for one in lendings]
            self.put()
            yield
        finally:
            self.is_in_place = False
            for one, before in zip(lendings, found, strict=bool(found)):
                one.tree.put_found(before)
            self._put_parametrized_back()
            self.is_lent = False
            self.owner.forget(self)


class LentWeights:
    """Lends half copies, in `dtype`, of the FP32 weights of one model.

    Weights of modules for which `stays_float` is true are left out, and those in `leave()` (ids).
    `at_change()` is called before a forward of a model that has got other parameters or parts.
    `computes_in()` is the dtype of the part of the forward that runs now.

    A model with half weights (O3) has nothing to lend: here is noted that its forward runs.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        stays_float: StaysFloat,
        leave: Callable[[], Collection[int]],
        state: CastState,
        kept: KeptCopies,
        at_change: Callable[[], object],
        computes_in: Callable[[], torch.dtype],
    ) -> None:
        self._model = model
        self.dtype = dtype
        self._stays_float = stays_float
        self._leave = leave
        self._excluded_ids: Collection[int] = ()
        self._state = state
        self._at_change = at_change
        self.computes_in = computes_in
        self._trees: dict[int, Tree] = {}  # by the ids of their roots
        self.known: set[int] = set()  # ids of the weights of the whole model, when last looked at
        self.has_changed = False  # the model has got parameters or parts since
        self.writes = LentWrites(model)
        self._kept = kept  # while it is open, they serve all forwards that record no graph
        # What is lent now, the innermost last: by one thread, which has the lock.
        self.lendings: list[Lending] = []
        self._forward_lock = threading.RLock()
        # What calls that Dynamo traces have exchanged, the outermost first.
        self.traced: list[tuple[nn.Module, list[Place]]] = []
        # Plain: Dynamo compiles frames of a weak dictionary's methods.
        self._hooked: dict[nn.Module, list[Any]] = {}

    def open(self) -> None:
        """From now on forwards of the model lend, what is FP32 now; until `close`."""
        if id(self._model) not in lenders:
            lenders[id(self._model)] = self
            weakref.finalize(self, _watch_registrations)
        _watch_registrations()
        self._trees.clear()
        self._tree_of(self._model)

    # Where the weights are

    def _tree_of(self, root: nn.Module) -> Tree:
        """The places of the model, or of a part of it, as they are now."""
        known = self._trees.get(id(root))
        if known is not None and known.root is root and known.is_valid():
            return known
        self._excluded_ids = self._leave()
        tree = Tree(root, self._stays_float, self._excluded_ids)
        self._watch_state_dicts(root)
        if not self._state.thread.lent:  # else copies of another model may be in the places
            self._trees[id(root)] = tree
            if root is self._model:
                self.known, self.has_changed = tree.ids, False
                if known is not None:
                    self._at_change()
        return tree

    def ids(self) -> set[int]:
        """Of the weights that the forward computes with half copies of."""
        if self.has_changed and not self.lendings:
            self._tree_of(self._model)
        return self.known

    def lends(self, weight: Any) -> bool:
        """Whether the forward computes with a half copy of this weight."""
        return id(weight) in self.ids()

    def _watch_state_dicts(self, root: nn.Module) -> None:
        own = set(root.modules())
        gone = [module for module in self._hooked if root is self._model and module not in own]
        for module in gone:
            for handle in self._hooked.pop(module):
                handle.remove()
        for module in own:
            if module not in self._hooked and not isinstance(module, torch.jit.ScriptModule):
                handles = self._hooked[module] = []  # each at once: what follows may raise
                handles.append(register_state_dict_hook(module, Hook(self._save_parameters)))
                handles.append(register_load_hook(module, Hook(self._before_load)))

    def _save_parameters(
        self, module: nn.Module, state_dict: dict, prefix: str, metadata: Any
    ) -> None:
        """A state dict made within a forward, perhaps in another thread, has the parameters.

        A half copy shares the attributes of its parameter; a detached one, without `keep_vars`,
        does not.
        """
        for name in list(module._parameters):
            saved = state_dict.get(prefix + name)
            if not isinstance(saved, Tensor) or saved.dtype is not self.dtype:
                continue
            parameter = _parameter_at(module._parameters, name)
            if parameter is not None and parameter.dtype is torch.float32:
                is_kept = vars(saved) is vars(parameter)
                state_dict[prefix + name] = parameter if is_kept else parameter.detach()

    def _before_load(self, *args: Any) -> None:
        """A checkpoint is about to be loaded, perhaps after a forward that Ctrl-C has ended."""
        self._state.end_interrupted()

    def note_registration(self, module: nn.Module, name: str, value: Any) -> Tensor | None:
        """A module has got a parameter or a submodule: those that have it are to be looked at.

        In a forward it is lent for the rest of it; of a parameter this returns the copy.
        """
        for tree in self._trees.values():
            if id(module) in tree.modules:
                tree.is_old = self.has_changed = True
        if value is None or is_dynamo_compiling() or self._stays_float(module):
            return None
        for lending in self._here():
            if lending.has(module):
                is_part = isinstance(value, nn.Module)
                place = Place(module._parameters, name, value)
                root, own = (value, None) if is_part else (module, [place])
                tree = Tree(root, self._stays_float, self._excluded_ids, own)
                copies = lending.lend_late(tree)
                return copies[0] if copies and not is_part else None
        return None

    # Around a call

    def _here(self) -> Iterator[Lending]:
        """What is in place in this thread, the innermost first."""
        here = threading.get_ident()
        return (one for one in reversed(self.lendings) if one.is_in_place and one.thread == here)

    def begin(self, root: nn.Module, is_traced: bool) -> None:
        """A call of the model or of a part of it begins; the outermost one lends.

        `is_traced`: by Dynamo.
        """
        if is_traced:
            if self.known:
                self._begin_traced(root)
            return
        if REPLICA in vars(root):
            self._lend_to_replica(root)
            return
        if self._state.thread.lent:
            self._state.end_interrupted()
            for lending in self._here():
                if lending.roots and id(root) in lending.tree.modules:
                    lending.roots.append(root)
                    return
        made: Lending | None = None
        try:
            if self.known:
                self.take_turn()
            if self._kept.blocks:
                self._kept.check()
            made = Lending(self, self._tree_of(root), root)
            self.note(made)
            made.put()
        except BaseException:
            if made is None:
                self._end_turn()
            else:
                self.take_back(made)
            raise

    def end(self, root: nn.Module, is_traced: bool) -> None:
        """A call has ended."""
        if is_traced:
            if self.traced:
                self._end_traced()
            return
        here = threading.get_ident()
        for lending in reversed(self.lendings):
            if lending.is_in_place and lending.thread == here and root in lending.roots:
                while lending.roots.pop() is not root:
                    pass
                if not lending.roots:
                    self.take_back(lending)
                return

    def take_turn(self) -> None:
        """Forwards of one model in several threads wait for each other: its tables are shared."""
        if not self._forward_lock.acquire(timeout=PATIENCE):
            raise AmpatchError(
                f"{type(self._model).__name__}: a forward in thread "
                f"{threading.current_thread().name!r} has waited {PATIENCE:g} seconds for one in "
                "another thread, which does not end: at O2 the forwards of one model in several "
                "threads take turns. Call the model in one thread, or a copy.deepcopy of it in "
                "each."
            )

    def _end_turn(self) -> None:
        """While nothing is lent this thread has no reason to hold the lock, however often."""
        try:
            while not self.lendings:
                self._forward_lock.release()
        except RuntimeError:  # it is not this thread's, or no longer
            pass

    def note(self, lending: Lending) -> None:
        """Before its copies are put in place."""
        self._state.thread.lent.append(lending)
        self.lendings.append(lending)

    def forget(self, lending: Lending) -> None:
        """After the parameters are back, never before.  The thread's own list is the last one."""
        lent = self._state.thread.lent
        if lending in self.lendings:
            self.lendings.remove(lending)
        if self.known:
            self._end_turn()
        if lending in lent:
            lent.remove(lending)
        lending.caller = None  # a frame keeps what the call had; nodes may keep the lending

    def take_back(self, lending: Lending) -> None:
        """End what was lent, also of a call that was interrupted."""
        lending.roots.clear()
        try:
            lending.take_back()
            lending.carry()
        finally:
            if not lending.is_lent:
                self.forget(lending)

    def is_joined(self, module: nn.Module) -> bool:
        """Whether the model is in another one whose forward, or a recompute, runs in this thread.

        That one casts what goes in and out.
        """
        key = id(module)
        for lending in self._state.thread.lent:
            is_outside = lending.is_repeated or lending.owner is not self
            if is_outside and lending.is_in_place and key in lending.tree.modules:
                return True
        return False

    def is_inside(self, part: nn.Module) -> bool:
        """Whether a forward, or a recompute, runs in this thread that the part belongs to.

        That is the model's own, or that of a model which shares the part.
        """
        if REPLICA in vars(part):  # of `nn.DataParallel`: a replica of the model calls it
            return True
        key = id(part)
        lent = self._state.thread.lent
        if not any(one.is_in_place and key in one.tree.modules for one in lent):
            return False
        roots = self._roots_here()
        if roots and roots[-1] is part:  # it calls itself
            roots.append(part)
        return True

    def is_end_of(self, part: nn.Module, is_traced: bool) -> bool:
        """Whether a call of a part from outside ends."""
        if is_traced:
            return bool(self.traced) and self.traced[-1][0] is part
        roots = self._roots_here()
        if not roots or roots[-1] is not part:
            return False
        if len(roots) > 1:
            roots.pop()
            return False
        return True

    def _roots_here(self) -> list[nn.Module]:
        """The calls that compute with what is lent now."""
        return next((lending.roots for lending in self._here() if lending.roots), [])

    def close(self) -> None:
        """Nothing is lent any more."""
        for lending in list(self.lendings):
            self.take_back(lending)
        self._trees.clear()
        if lenders.get(id(self._model)) is self:
            del lenders[id(self._model)]
        _watch_registrations()
        for handles in self._hooked.values():
            for handle in handles:
                handle.remove()
        self._hooked.clear()

    # How the copies are made: in buckets, in the order of the parameters

    def copies_of(self, tree: Tree) -> list[Tensor]:
        """Half copies of the parameters of a tree, in their order."""
        if not tree.parameters:
            return []
        if torch.is_inference_mode_enabled():  # tensors of that mode have no versions
            with torch.inference_mode(False), torch.no_grad():
                return self.copies_of(tree)
        if is_recording():
            return [parameter.to(self.dtype) for parameter in tree.parameters]
        in_graph = torch.is_grad_enabled()
        if self._kept.blocks and not in_graph:
            return self._kept.of_all(tree.groups, self.dtype)
        hooked = tree.below_hooks() if in_graph and any(tree.hook_tables) else ()
        are_together = in_graph and self._model.training and may_use_all(self._model)
        made: list[Tensor] = []
        for weights, in_block in tree.groups:
            if in_block:
                copies = cast_in_one_block(weights, self.dtype)
                run_when_ready(copies[0])
                made += copies
            elif not in_graph or (are_together and not hooked and are_alike(weights[0], weights)):
                made += self._cast(weights)
            else:
                made += self._cast_in_part(weights, hooked, are_together)
        return made

    def _cast(self, weights: list[Tensor]) -> Sequence[Tensor]:
        """Weights that all want a gradient, or none of which does."""
        if weights[0].requires_grad and torch.is_grad_enabled():
            made = cast_in_graph(weights, self.dtype)
            run_when_ready(made[0])
            return made
        if self._kept.blocks:
            return self._kept.of(weights, self.dtype)
        return cast_together(weights, self.dtype, in_graph=False)

    def _cast_in_part(
        self, weights: list[Tensor], hooked: Collection[int], are_together: bool
    ) -> list[Tensor]:
        """Weights with hooks, and those in `hooked` (ids), have a node each."""
        frozen = [one for one in weights if not one.requires_grad]
        group = [
            one
            for one in weights
            if are_together and one.requires_grad and may_share_node(one) and id(one) not in hooked
        ]
        copies: dict[int, Tensor] = {}
        for alike in (frozen, group):
            if alike:
                copies.update(zip(map(id, alike), self._cast(alike), strict=True))
        for one in weights:
            if id(one) not in copies:
                copies[id(one)] = made = one.to(self.dtype)
                run_when_ready(made)
        return [copies[id(one)] for one in weights]

    def _lend_to_replica(self, replica: nn.Module) -> None:
        """A replica of `nn.DataParallel` has its weights as plain attributes of its own."""
        for own, part in zip(self._model.modules(), replica.modules(), strict=True):
            if self._stays_float(own):
                continue
            for name, weight in list(vars(part).items()):
                if name in own._parameters and getattr(weight, "dtype", None) is torch.float32:
                    vars(part)[name] = weight.to(self.dtype)
            if isinstance(part, nn.RNNBase):
                list_weights(part)

    # Where Dynamo traces: places are found anew, since it guards on what it has read

    def _begin_traced(self, root: nn.Module) -> None:
        places = lent_of(all_places(root, self._stays_float), self._excluded_ids)
        copies: dict[int, Tensor] = {}
        for table, name, weight in places:
            if id(weight) not in copies:
                copies[id(weight)] = weight.to(self.dtype)
            table[name] = copies[id(weight)]
        self.traced.append((root, places))

    def _end_traced(self) -> None:
        for table, name, parameter in self.traced.pop()[1]:
            table[name] = parameter
