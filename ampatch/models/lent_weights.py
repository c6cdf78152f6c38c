"""O2: half copies of a model's FP32 weights, lent to its modules while a forward runs.

A weight exists once, in FP32, as the model's parameter, which is also what the optimizer holds.
When the outermost call of the model, or of a part of it, begins, half copies are put in the
parameters' places in `module._parameters`; when it ends, the parameters are put back.  One node of
the graph casts many weights (`casting/batched_casts`), so that gradients reach `parameter.grad`
in FP32 through the parameters' own accumulators.

The nodes are made before the forward, and autograd runs ready nodes by the order in which they were
made: they would run at the very end of the pass, and all half gradients would wait for them.  So
they get a high sequence number, with which each runs as soon as its gradients are there.

FSDP2 (`MixedPrecisionPolicy`) treats unsharded parameters in this way.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..casting.cast_state import CastState
from ..casting.kept_copies import KeptCopies
from ..casting.stack import calling_frame, is_running
from ..log import logger
from ..torch_private.devices import has_values, is_captured
from ..torch_private.dtensors import local_of
from ..torch_private.modules import REPLICA, list_weights
from ..torch_private.probes import computes_with_fakes, is_recording
from . import entries
from .hooks import add_load_hook, add_state_dict_hook
from .lent_casts import LentCasts
from .lent_places import Place, StaysFloat, Tree, is_lent, places_in
from .registrations import registrations
from .turns import Turns

lenders: weakref.WeakValueDictionary[int, LentWeights] = weakref.WeakValueDictionary()
"""By the ids of their models, which they hold."""

_version_of = operator.attrgetter("_version")


class Lending:
    """The half copies of one call, one for each parameter of `tree`."""

    def __init__(
        self, tree: Tree, copies: list[Tensor], owner: LentWeights, thread: threading.Thread
    ) -> None:
        self.tree = tree
        self.copies = copies
        self.thread = thread
        self.caller = calling_frame()  # if this frame runs no longer, the call was interrupted
        self.is_in_place = False
        self.late: list[tuple[Place, Tensor]] = []  # copies for parts that the forward has made
        self.begun_as: dict[int, Tensor] = {}  # copies that are compared in the end, by place
        self._versions = list(map(_version_of, copies))
        self._owner = owner

    @functools.cached_property
    def behind(self) -> dict[int, Tensor]:
        """The parameters by the ids of their copies."""
        return dict(zip(map(id, self.copies), self.tree.parameters, strict=True))

    def _put_again(self) -> None:
        self.tree.put(self.copies)
        self.is_in_place = True
        for place, copy in self.late:
            place.table[place.name] = copy

    def lend_late(self, part: nn.Module) -> None:
        """The forward has put a new part into the model: from now on its weights are lent too."""
        known: dict[int, Tensor] = {}
        for place in self._owner.places_in(part):
            weight = place.parameter
            copy = known.setdefault(id(weight), weight.to(self._owner.dtype))
            place.table[place.name] = copy
            self.behind[id(copy)] = weight
            self.late.append((place, copy))

    def _take_back_late(self) -> None:
        for place, copy in self.late:
            if place.table.get(place.name) is copy:
                place.table[place.name] = place.parameter
                if not copy.is_inference() and copy._version:
                    self._owner.carry(copy, place.parameter)

    def take_back(self) -> None:
        """Put the parameters back; what the forward wrote into copies goes to them."""
        self.is_in_place = False
        if self.late:
            self._take_back_late()
        parameters, copies = self.tree.parameters, self.copies
        self.tree.put(parameters, instead_of=copies)
        if list(map(_version_of, copies)) != self._versions:
            for parameter, copy, version in zip(parameters, copies, self._versions, strict=True):
                if copy._version != version:
                    self._owner.carry(copy, parameter)
        for index in self._written_unseen() if self.begun_as else ():
            self._owner.carry(copies[index], parameters[index])
            self._owner.compared.add(id(parameters[index]))

    def _written_unseen(self) -> list[int]:
        """The copies that are compared, and differ.  Waits once for the device."""
        home = next(iter(self.begun_as.values())).device
        flags = [
            _differ(before, local_of(self.copies[index]).detach()).any().to(home)
            for index, before in self.begun_as.items()
        ]
        return [index for index, flag in zip(self.begun_as, torch.stack(flags).tolist()) if flag]

    def compare(self, only: Collection[int] | None) -> None:
        """See writes through `.data` too, into the copies of these parameters (ids), or of all."""
        for index, (parameter, copy) in enumerate(
            zip(self.tree.parameters, self.copies, strict=True)
        ):
            is_wanted = only is None or id(parameter) in only
            if is_wanted and has_values(copy.device) and not is_captured(copy):
                self.begun_as[index] = local_of(copy).detach().clone()

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
        with self._owner.reserved() as lent:
            found = self.tree.found()
            self._put_again()
            lent.append(self)  # what is called and noted here is as within the forward
            try:
                yield
            finally:
                lent.remove(self)
                self.is_in_place = False
                self.tree.put_found(found)
                self._take_back_late()


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Elementwise; a NaN equals any NaN."""
    return (one != other) & ~(one.isnan() & other.isnan())


def lent_as(weight: Any) -> torch.dtype | None:
    """The type of the copies of a weight that some model lends; None of anything else."""
    for lender in list(lenders.values()):
        if any(weight is one for one in lender.whole().parameters):
            return lender.dtype
    return None


def lent_in(model: nn.Module) -> set[int]:
    """Ids of the parameters of a model that other models lend."""
    own, found = set(map(id, model.parameters())), set()
    for lender in list(lenders.values()):
        if lender.has_changed:
            lender.whole()
        found |= own & lender.lent
    return found


def parameter_behind(tensor: Tensor) -> Tensor | None:
    """The parameter that a lent copy stands in for; None for other tensors."""
    for lender in list(lenders.values()):
        running = lender.running
        found = None if running is None else running.behind.get(id(tensor))
        if found is not None:
            return found
    return None


def _note_registration(module: nn.Module, value: Any) -> None:
    """A module gets a parameter or a submodule, perhaps in a forward of the model that it is in."""
    for lender in list(lenders.values()):
        lender.note_registration(module, value)


registrations.tell = _note_registration


def _save_parameters(module: nn.Module, state_dict: dict, prefix: str, metadata: Any) -> None:
    """A state dict made within a forward, perhaps in another thread, has the parameters."""
    for name, entry in module._parameters.items():
        saved = state_dict.get(prefix + name)
        parameter = None if entry is None else parameter_behind(entry)
        if parameter is not None and isinstance(saved, Tensor):
            state_dict[prefix + name] = parameter if saved is entry else parameter.detach()


def _remove(handles: tuple[Any, ...]) -> None:
    for handle in handles:
        handle.remove()


class LentWeights:
    """Lends half copies, in `dtype`, of the FP32 weights of one model.

    Weights of modules for which `stays_float` is true are left out, and those in `leave()` (ids).
    `at_change()` is called before a forward of a model that has got other parameters or parts.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        stays_float: StaysFloat,
        leave: Callable[[], Collection[int]],
        state: CastState,
        kept: KeptCopies,
        at_change: Callable[[], None],
    ) -> None:
        self._model = model
        self.dtype = dtype
        self._stays_float = stays_float
        self._leave = leave
        self._state = state
        self._trees: dict[int, Tree] = {}
        self._turns = Turns(type(model).__name__, self._running_in, self._end)
        self._casts = LentCasts(model, dtype, kept)
        self.running: Lending | None = None
        self._at_change = at_change
        self._kept = kept  # while it is open, they serve all forwards that record no graph
        self.compared: set[int] = set()  # ids of weights that forwards write into through `.data`
        self._forwards, self._next_look = 0, 1  # with a graph
        self.lent: set[int] = set()  # ids of the weights of the whole model, when last looked at
        self.has_changed = False  # the model has got parameters or parts since
        self._has_warned = False
        self._roots: list[nn.Module] = []  # of the calls that run, the outermost first
        self._left: Collection[int] = ()  # what `leave` has said
        # What calls that Dynamo traces have exchanged, the outermost first.
        self.traced: list[tuple[nn.Module, list[Place]]] = []
        # Plain: Dynamo compiles frames of a weak dictionary's methods.
        self._hooked: dict[nn.Module, Any] = {}
        lenders[id(model)] = self
        registrations.watch()
        self._stop_watching = weakref.finalize(self, registrations.stop)
        self.whole()

    def tree_of(self, root: nn.Module) -> Tree:
        """The places of the model, or of a part of it, as they are now."""
        tree = self._trees.get(id(root))
        if tree is None or tree.root is not root or not tree.is_valid():
            self._left = self._leave()
            tree = Tree(root, self._stays_float, self._left)
            self._watch_state_dicts(root)
            if not self._state.thread.lent:  # else copies of another model may be in the places
                self._trees[id(root)] = tree
                if root is self._model:
                    self.lent = set(map(id, tree.parameters))
        return tree

    def _watch_state_dicts(self, root: nn.Module) -> None:
        own = set(root.modules())
        gone = [module for module in self._hooked if root is self._model and module not in own]
        for module in gone:
            _remove(self._hooked.pop(module))
        for module in own:
            if module not in self._hooked and not isinstance(module, torch.jit.ScriptModule):
                self._hooked[module] = (
                    add_state_dict_hook(module, _save_parameters),
                    add_load_hook(module, self._before_load),
                )

    def _before_load(self, *args: Any) -> None:
        """A checkpoint is about to be loaded, perhaps after a forward that Ctrl-C has ended."""
        self._state.end_interrupted()

    def places_in(self, root: nn.Module) -> list[Place]:
        """Where FP32 weights stand now that the model lends, found without a tree."""
        return places_in(root, self._stays_float, self._left)

    def note_registration(self, module: nn.Module, value: Any) -> None:
        """A module has got a parameter or a submodule: those that have it are to be looked at."""
        for tree in self._trees.values():
            if id(module) in tree.modules:
                tree.is_old = self.has_changed = True
        running = self.running
        if (
            isinstance(value, nn.Module)
            and running is not None
            and running.is_in_place
            and not is_dynamo_compiling()
            and running.thread is threading.current_thread()
            and id(module) in running.tree.modules
        ):
            running.lend_late(value)

    def whole(self) -> Tree:
        """The places of the whole model."""
        return self.tree_of(self._model)

    def lends(self, parameter: Tensor) -> bool:
        """Whether the forward computes with a half copy of this weight."""
        return any(one is parameter for one in self.whole().parameters)

    def look(self) -> None:
        """A forward of the model is about to begin, which has other parameters or parts by now."""
        if self.running is None:
            self.has_changed = False
            self.whole()
            self._at_change()

    def begin(self, root: nn.Module) -> None:
        """A call of the model or of a part of it begins; the outermost one lends.

        Where Dynamo traces, `begin_traced` does.
        """
        if REPLICA in vars(root):
            self._lend_to_replica(root)
            return
        running, thread = self.running, self._state.thread
        if thread.itself is None:
            thread.itself = threading.current_thread()
        if running is not None and running.thread is thread.itself:
            if is_running(running.caller):
                self._roots.append(root)
                return
            self._end()
        self._turns.begin()
        try:
            if self._kept.is_open:
                self._kept.check()
            tree = self.tree_of(root)
            lending = Lending(tree, self._casts.of(tree), self, thread.itself)
            # What is noted on a parameter (`p.lr_mult`) is read and written on its copy too.
            entries.share_attributes(lending.copies, tree.attributes)
            if torch.is_grad_enabled():
                self._forwards += 1
            if self._forwards >= self._next_look or self.compared:
                self._compare(lending)
            self.running, self._roots = lending, [root]
            thread.lent.append(lending)
            tree.put(lending.copies)
            lending.is_in_place = True
        except BaseException:
            self._end()
            raise

    def _compare(self, lending: Lending) -> None:
        """See writes through `.data`, of modules that are known to make them.

        All are looked at in training forwards 1, 10, 100, ...: some begin after a warm-up.
        """
        if is_recording() or computes_with_fakes():
            return
        is_due = torch.is_grad_enabled() and self._forwards >= self._next_look
        if is_due:
            self._next_look *= 10
        if is_due or self.compared:
            lending.compare(None if is_due else self.compared)

    def end(self, root: nn.Module) -> None:
        """A call has ended."""
        running = self.running
        if running is None or running.thread is not self._state.thread.itself:
            return
        if REPLICA in vars(root):
            return
        while self._roots and self._roots.pop() is not root:
            pass
        if not self._roots:
            self._end()

    def _running_in(self) -> threading.Thread | None:
        return None if self.running is None else self.running.thread

    @contextlib.contextmanager
    def reserved(self) -> Iterator[list[Any]]:
        """No other thread lends meanwhile; gives what is lent in this one."""
        with self._turns.reserved():
            yield self._state.thread.lent

    def drop(self, lending: Lending) -> None:
        """That call was interrupted."""
        if self.running is lending:
            self._end()

    def is_joined(self, module: nn.Module) -> bool:
        """Whether the model, or a part of it, is in another one that lends in this thread.

        That one casts what goes in and out.
        """
        lent, running = self._state.thread.lent, self.running
        if not lent or (len(lent) == 1 and lent[0] is running):
            return False
        key = id(module)
        return any(key in lending.tree.modules for lending in lent if lending is not running)

    def _end(self) -> None:
        lending, self.running, self._roots = self.running, None, []
        try:
            if lending is not None:
                if lending in self._state.thread.lent:
                    self._state.thread.lent.remove(lending)
                lending.take_back()
        finally:
            self._turns.end()

    def carry(self, copy: Tensor, parameter: Tensor) -> None:
        """Write into a parameter what was written into its copy; the rest keeps its FP32 values."""
        with torch.no_grad():
            same = parameter.to(copy.dtype) == copy
            parameter.copy_(torch.where(same, parameter, copy.to(parameter.dtype)))
        if self._kept.is_open:
            self._kept.settle()
        if not self._has_warned:
            self._has_warned = True
            self._warn_of_rounding(parameter)

    def _warn_of_rounding(self, written: Tensor) -> None:
        names = [name for name, one in self._model.named_parameters() if one is written]
        logger.warning(
            "%s writes into its weights in its own forward (%s). At O2 it has half copies there: "
            "what is written is rounded to %s, and small changes, as of an average, are lost. "
            "Write outside of the forward, or keep that part in FP32: "
            'overrides={"name.*": "float"}.',
            type(self._model).__name__,
            names[0] if names else "a weight",
            self.dtype,
        )

    def close(self) -> None:
        """Nothing is lent any more."""
        if self.running is not None:
            self._end()
        self._trees.clear()
        if lenders.get(id(self._model)) is self:
            del lenders[id(self._model)]
        self._stop_watching()
        for handles in self._hooked.values():
            _remove(handles)

    def _lend_to_replica(self, replica: nn.Module) -> None:
        """A replica of `nn.DataParallel` has its weights as plain attributes of its own."""
        for own, part in zip(self._model.modules(), replica.modules(), strict=True):
            if self._stays_float(own):
                continue
            for name, weight in list(vars(part).items()):
                if isinstance(weight, Tensor) and name in own._parameters and is_lent(weight):
                    vars(part)[name] = weight.to(self.dtype)
            if isinstance(part, nn.RNNBase):
                list_weights(part)

    # Where Dynamo traces

    def begin_traced(self, root: nn.Module) -> None:
        """As `begin`, found anew: Dynamo guards on what it has read, and a tree may be old."""
        places = self.places_in(root)
        copies: dict[int, Tensor] = {}
        for table, name, weight in places:
            if id(weight) not in copies:
                copies[id(weight)] = weight.to(self.dtype)
            table[name] = copies[id(weight)]
        self.traced.append((root, places))

    def end_traced(self) -> None:
        """As `end`."""
        _, places = self.traced.pop()
        for table, name, parameter in places:
            table[name] = parameter
