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
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..casting.batched_casts import (
    alike,
    below_hooks,
    cast_in_graph,
    cast_in_one_block,
    cast_together,
    divide,
    may_be_planned,
    may_use_all,
)
from ..casting.calling_frames import calling_frame, is_running
from ..casting.cast_state import CastState
from ..casting.kept_copies import KeptCopies
from ..errors import AmpatchError
from ..torch_private.devices import has_values
from ..torch_private.dtensors import is_dtensor
from ..torch_private.modules import (
    GLOBAL_BACKWARD_TABLES,
    backward_tables,
    flat_weights,
    is_replica,
    list_weights,
)
from ..torch_private.nodes import run_when_ready
from ..torch_private.probes import computes_with_fakes, is_recording
from .hooks import add_state_dict_hook
from .registrations import registrations

PATIENCE = 300.0
"""Seconds that a forward waits for one in another thread, before it counts as one without end."""

lenders: weakref.WeakValueDictionary[int, LentWeights] = weakref.WeakValueDictionary()
"""By the ids of their models, which they hold."""

_waiting: dict[threading.Thread, LentWeights] = {}
"""Threads that wait, and for whose copies."""

StaysFloat = Callable[[nn.Module], bool]

_version_of = operator.attrgetter("_version")


class Place(NamedTuple):
    """An entry of a module's table of parameters, and what is there outside of forwards."""

    table: dict[str, Any]
    name: str
    parameter: Tensor


class Tree:
    """A module and its parts: the places that are lent to, with their parameters in buckets.

    Those in `leave` (ids) are left out.
    """

    def __init__(self, root: nn.Module, stays_float: StaysFloat, leave: Collection[int]) -> None:
        self.root = root
        self.modules = set(map(id, root.modules()))
        self.places: list[Place] = []
        self.rnns: list[nn.RNNBase] = []
        self._generation = registrations.count
        seen: list[tuple[dict, str, Tensor | None]] = []
        for module in root.modules():
            if isinstance(module, torch.jit.ScriptModule) or stays_float(module):
                continue
            for name, parameter in module._parameters.items():
                seen.append((module._parameters, name, parameter))
                if _is_lent(parameter) and id(parameter) not in leave:
                    self.places.append(Place(module._parameters, name, parameter))
            if isinstance(module, nn.RNNBase):
                self.rnns.append(module)
        self._seen = tuple(map(list, zip(*seen, strict=True))) or ([], [], [])
        found = {id(place.parameter): place.parameter for place in self.places}
        # Together the buckets are `parameters`, in this order.
        self.blocks = self._blocks(found)
        self.buckets = divide(list(found.values()))
        self.groups = [
            *((one, True) for one in self.blocks),
            *((one, False) for one in self.buckets),
        ]
        self.parameters = [one for weights, _ in self.groups for one in weights]
        order = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._sources = [order[id(place.parameter)] for place in self.places]
        self._tables = [place.table for place in self.places]
        self._names = [place.name for place in self.places]
        self._attributes = list(map(vars, self.parameters))
        self._hook_tables = [*GLOBAL_BACKWARD_TABLES]
        for module in root.modules():
            self._hook_tables += backward_tables(module)

    def _blocks(self, found: dict[int, Tensor]) -> list[list[Tensor]]:
        """Takes out of `found` the weights of RNNs that share one block of memory.

        cuDNN wants them so, else it copies them, and warns, at every forward.
        """
        blocks: list[list[Tensor]] = []
        for rnn in self.rnns:
            weights = flat_weights(rnn)
            if weights and all(id(weight) in found for weight in weights):
                blocks.append([found.pop(id(weight)) for weight in weights])
        return blocks

    def below_hooks(self) -> set[int]:
        """Ids of the parameters of modules with backward hooks, and of their parts."""
        return below_hooks(list(self.root.modules())) if any(self._hook_tables) else set()

    def is_valid(self) -> bool:
        """Whether the tables hold what was found there."""
        tables, names, found = self._seen
        return self._generation == registrations.count and all(
            map(operator.is_, map(dict.get, tables, names), found)
        )

    def share_attributes(self, copies: list[Tensor]) -> None:
        """What is noted on a parameter (`p.lr_mult`) is read and written on its copy too."""
        for copy, attributes in zip(copies, self._attributes, strict=True):
            if type(copy) is Tensor:  # those of other types have attributes of their own
                copy.__dict__ = attributes

    def put(self, tensors: Sequence[Tensor], instead_of: Sequence[Tensor] | None = None) -> None:
        """Put `tensors`, one for each of `parameters`, in the places.

        With `instead_of` only where one of those is: what the user's code has put there stays.
        """
        tables, names = self._tables, self._names
        new = list(map(tensors.__getitem__, self._sources))
        if instead_of is not None:
            known = list(map(instead_of.__getitem__, self._sources))
            found = list(map(dict.get, tables, names))
            if not all(map(operator.is_, found, known)):
                self.put_found(
                    [
                        theirs if theirs is not ours else mine
                        for mine, theirs, ours in zip(new, found, known, strict=True)
                    ]
                )
                return
        deque(map(dict.__setitem__, tables, names, new), maxlen=0)
        for rnn in self.rnns:
            list_weights(rnn)

    def put_found(self, tensors: list[Any]) -> None:
        """Put them in the places that are still in their tables."""
        for table, name, tensor in zip(self._tables, self._names, tensors, strict=True):
            if name in table:
                table[name] = tensor
        for rnn in self.rnns:
            list_weights(rnn)

    def found(self) -> list[Any]:
        """What is in the places now."""
        return list(map(dict.get, self._tables, self._names))


def _is_lent(parameter: Tensor | None) -> TypeGuard[Tensor]:
    """Whether it is a weight that a half copy can stand in for."""
    return parameter is not None and parameter.dtype is torch.float32


class Lending:
    """The half copies of one call, one for each parameter of `tree`."""

    def __init__(self, tree: Tree, copies: list[Tensor], owner: LentWeights) -> None:
        self.tree = tree
        self.copies = copies
        self.thread = threading.current_thread()
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

    def put(self) -> None:
        """Put the copies in place."""
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
        self._take_back_late()
        parameters, copies = self.tree.parameters, self.copies
        self.tree.put(parameters, instead_of=copies)
        if list(map(_version_of, copies)) != self._versions:
            for parameter, copy, version in zip(parameters, copies, self._versions, strict=True):
                if copy._version != version:
                    self._owner.carry(copy, parameter)
        for index, before in self.begun_as.items():
            if not torch.equal(before, copies[index].detach()):
                self._owner.carry(copies[index], parameters[index])
                self._owner.compared.add(id(parameters[index]))

    def compare(self, only: Collection[int] | None) -> None:
        """See writes through `.data` too, into the copies of these parameters (ids), or of all."""
        for index, (parameter, copy) in enumerate(
            zip(self.tree.parameters, self.copies, strict=True)
        ):
            if (only is None or id(parameter) in only) and has_values(copy.device):
                self.begun_as[index] = copy.detach().clone()

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
            self.put()
            lent.append(self)  # what is called and noted here is as within the forward
            try:
                yield
            finally:
                lent.remove(self)
                self.is_in_place = False
                self.tree.put_found(found)
                self._take_back_late()


def lent_as(weight: Any) -> torch.dtype | None:
    """The type of the copies of a weight that some model lends; None of anything else."""
    for lender in list(lenders.values()):
        if any(weight is one for one in lender.whole().parameters):
            return lender.dtype
    return None


def lent_in(model: nn.Module) -> set[int]:
    """Ids of the parameters of a model that other models lend."""
    lent = {id(one) for lender in list(lenders.values()) for one in lender.whole().parameters}
    return lent & set(map(id, model.parameters())) if lent else lent


def parameter_behind(tensor: Tensor) -> Tensor | None:
    """The parameter that a lent copy stands in for; None for other tensors."""
    for lender in list(lenders.values()):
        running = lender.running
        found = None if running is None else running.behind.get(id(tensor))
        if found is not None:
            return found
    return None


def _lend_late(parent: nn.Module, part: nn.Module) -> None:
    """A module gets a submodule, perhaps in a forward of the model that it is in."""
    me = threading.current_thread()
    for lender in list(lenders.values()):
        running = lender.running
        if (
            running is not None
            and running.is_in_place
            and running.thread is me
            and id(parent) in running.tree.modules
        ):
            running.lend_late(part)


registrations.tell = _lend_late


def _save_parameters(module: nn.Module, state_dict: dict, prefix: str, metadata: Any) -> None:
    """A state dict made within a forward, perhaps in another thread, has the parameters."""
    for name, entry in module._parameters.items():
        saved = state_dict.get(prefix + name)
        parameter = None if entry is None else parameter_behind(entry)
        if parameter is not None and isinstance(saved, Tensor):
            state_dict[prefix + name] = parameter if saved is entry else parameter.detach()


class LentWeights:
    """Lends half copies, in `dtype`, of the FP32 weights of one model.

    Weights of modules for which `stays_float` is true are left out, and those in `leave()` (ids).
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        stays_float: StaysFloat,
        leave: Callable[[], Collection[int]],
        state: CastState,
        kept: KeptCopies,
    ) -> None:
        self._model = model
        self.dtype = dtype
        self._stays_float = stays_float
        self._leave = leave
        self._state = state
        self._trees: dict[int, Tree] = {}
        self._lock = threading.Lock()
        self.running: Lending | None = None
        self._reserved_by: threading.Thread | None = None
        self._nested = 0  # calls within what has reserved it
        self._kept = kept  # while it is open, they serve all forwards that record no graph
        self.compared: set[int] = set()  # ids of weights that forwards write into through `.data`
        self._is_first = True  # no training forward yet
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
        return tree

    def _watch_state_dicts(self, root: nn.Module) -> None:
        own = set(root.modules())
        gone = [module for module in self._hooked if root is self._model and module not in own]
        for module in gone:
            self._hooked.pop(module).remove()
        for module in own:
            if module not in self._hooked and not isinstance(module, torch.jit.ScriptModule):
                self._hooked[module] = add_state_dict_hook(module, _save_parameters)

    def places_in(self, root: nn.Module) -> list[Place]:
        """Where FP32 weights stand now that the model lends, found without a tree."""
        places: list[Place] = []
        for module in root.modules():
            if isinstance(module, torch.jit.ScriptModule) or self._stays_float(module):
                continue
            for name, parameter in module._parameters.items():
                if _is_lent(parameter) and not (self._left and id(parameter) in self._left):
                    places.append(Place(module._parameters, name, parameter))
        return places

    def whole(self) -> Tree:
        """The places of the whole model."""
        return self.tree_of(self._model)

    def lends(self, parameter: Tensor) -> bool:
        """Whether the forward computes with a half copy of this weight."""
        return any(one is parameter for one in self.whole().parameters)

    def begin(self, root: nn.Module) -> None:
        """A call of the model or of a part of it begins; the outermost one lends."""
        if is_dynamo_compiling():
            self._put_traced(root)
            return
        if is_replica(root):
            self._lend_to_replica(root)
            return
        running = self.running
        if running is not None and running.thread is threading.current_thread():
            if is_running(running.caller):
                self._roots.append(root)
                return
            self._end()
        self._acquire()
        try:
            if self._kept.is_open:
                self._kept.check()
            tree = self.tree_of(root)
            lending = Lending(tree, self._copies(tree), self)
            tree.share_attributes(lending.copies)
            if self.compared or (self._is_first and torch.is_grad_enabled()):
                self._compare(lending)
            self.running, self._roots = lending, [root]
            self._state.thread.lent.append(lending)
            lending.put()
        except BaseException:
            self._end()
            raise

    def _compare(self, lending: Lending) -> None:
        """See writes through `.data`: of all modules in the first training forward, of those that
        do it from then on.
        """
        if is_recording() or computes_with_fakes():
            return
        if self._is_first and torch.is_grad_enabled():
            self._is_first = False
            lending.compare(None)
        else:
            lending.compare(self.compared)

    def end(self, root: nn.Module) -> None:
        """A call has ended."""
        if is_dynamo_compiling():
            self._take_back_traced()
            return
        running = self.running
        if running is None or running.thread is not threading.current_thread() or is_replica(root):
            return
        while self._roots and self._roots.pop() is not root:
            pass
        if not self._roots:
            self._end()

    def drop(self, lending: Lending) -> None:
        """That call was interrupted."""
        if self.running is lending:
            self._end()

    def is_joined(self) -> bool:
        """Whether the model is part of another one that has lent its weights in this thread.

        That one casts what goes in and out.
        """
        if not self._state.thread.lent:
            return False
        running = self.running
        return any(
            id(self._model) in lending.tree.modules
            for lending in self._state.thread.lent
            if lending is not running
        )

    def _end(self) -> None:
        lending, self.running, self._roots = self.running, None, []
        try:
            if lending is not None:
                if lending in self._state.thread.lent:
                    self._state.thread.lent.remove(lending)
                lending.take_back()
        finally:
            self._release()

    def carry(self, copy: Tensor, parameter: Tensor) -> None:
        """Write into a parameter what was written into its copy; the rest keeps its FP32 values."""
        with torch.no_grad():
            same = parameter.to(copy.dtype) == copy
            parameter.copy_(torch.where(same, parameter, copy.to(parameter.dtype)))
        if self._kept.is_open:
            self._kept.settle()

    def close(self) -> None:
        """Nothing is lent any more."""
        if self.running is not None:
            self._end()
        self._trees.clear()
        if lenders.get(id(self._model)) is self:
            del lenders[id(self._model)]
        self._stop_watching()
        for handle in self._hooked.values():
            handle.remove()

    def _acquire(self) -> None:
        """Wait until no other thread has copies in the places: the tables are there for all."""
        if self._reserved_by is threading.current_thread():
            self._nested += 1
            return
        if self._lock.acquire(blocking=False):
            return
        me = threading.current_thread()
        _waiting[me] = self
        try:
            begun = time.monotonic()
            while not self._lock.acquire(timeout=0.1):
                running = self.running
                if running is None:
                    continue
                if not running.thread.is_alive():
                    self._end()
                elif self._waits_for(me) or time.monotonic() - begun > PATIENCE:
                    raise AmpatchError(
                        f"{type(self._model).__name__}: a forward in thread {me.name!r} waits for "
                        f"one in thread {running.thread.name!r}, which does not end: at O2 the "
                        "forwards of one model in several threads take turns. Call the model in "
                        "one thread, or a copy.deepcopy of it in each."
                    )
        finally:
            _waiting.pop(me, None)

    def _release(self) -> None:
        if self._nested:
            self._nested -= 1
        else:
            self._lock.release()

    def _waits_for(self, thread: threading.Thread) -> bool:
        """Whether the thread that has the copies waits, perhaps through others, for `thread`."""
        seen: set[int] = set()
        held: LentWeights | None = self
        while held is not None and held.running is not None and id(held) not in seen:
            seen.add(id(held))
            if held.running.thread is thread:
                return True
            held = _waiting.get(held.running.thread)
        return False

    @contextlib.contextmanager
    def reserved(self) -> Iterator[list[Any]]:
        """No other thread lends meanwhile; gives what is lent in this one."""
        me, running, lent = threading.current_thread(), self.running, self._state.thread.lent
        if self._reserved_by is me or (running is not None and running.thread is me):
            yield lent
            return
        self._acquire()
        self._reserved_by = me
        try:
            yield lent
        finally:
            self._reserved_by = None
            self._lock.release()

    # Copies

    def _copies(self, tree: Tree) -> list[Tensor]:
        if torch.is_inference_mode_enabled():  # tensors of that mode have no versions
            with torch.inference_mode(False), torch.no_grad():
                return self._copies(tree)
        if is_recording():
            return [parameter.to(self.dtype) for parameter in tree.parameters]
        if torch.is_grad_enabled():
            return self._in_graph(tree)
        if self._kept.is_open:
            return self._kept.of_all(tree.groups, self.dtype)
        made = self._of_blocks(tree)
        for bucket in tree.buckets:
            made += cast_together(bucket, self.dtype, in_graph=False)
        return made

    def _of_blocks(self, tree: Tree) -> list[Tensor]:
        made: list[Tensor] = []
        for block in tree.blocks:
            copies = cast_in_one_block(block, self.dtype)
            run_when_ready(copies[0])
            made += copies
        return made

    def _outside_graphs(self, weights: list[Tensor]) -> Sequence[Tensor]:
        if self._kept.is_open:
            return self._kept.of(weights, self.dtype)
        return cast_together(weights, self.dtype, in_graph=False)

    def _in_graph(self, tree: Tree) -> list[Tensor]:
        alone = tree.below_hooks()
        are_together = self._model.training and may_use_all(self._model)
        made = self._of_blocks(tree)
        for bucket in tree.buckets:
            if are_together and not alone and alike(bucket[0], bucket) is bucket:
                made += self._cast(bucket)
            else:
                made += self._apart(bucket, alone if are_together else None)
        return made

    def _cast(self, weights: list[Tensor]) -> Sequence[Tensor]:
        """Weights that all want a gradient, or none of which does."""
        if not weights[0].requires_grad:
            return self._outside_graphs(weights)
        made = cast_in_graph(weights, self.dtype)
        run_when_ready(made[0])
        return made

    def _apart(self, bucket: list[Tensor], alone: Collection[int] | None) -> list[Tensor]:
        """Some of a bucket go by themselves: those with hooks, in `alone` (ids; None: all), ..."""
        copies: dict[int, Tensor] = {}
        frozen = [one for one in bucket if not one.requires_grad]
        group = [
            one
            for one in bucket
            if alone is not None
            and one.requires_grad
            and may_be_planned(one)
            and id(one) not in alone
        ]
        for weights in (frozen, group):
            if weights:
                copies.update(zip(map(id, weights), self._cast(weights), strict=True))
        return [copies[id(one)] if id(one) in copies else self._alone(one) for one in bucket]

    def _alone(self, weight: Tensor) -> Tensor:
        if type(weight) is nn.Parameter and weight.is_leaf and not is_dtensor(weight):
            return self._cast([weight])[0]
        made = weight.to(self.dtype)
        run_when_ready(made)
        return made

    def _lend_to_replica(self, replica: nn.Module) -> None:
        """A replica of `nn.DataParallel` has its weights as plain attributes of its own."""
        for own, part in zip(self._model.modules(), replica.modules(), strict=True):
            if self._stays_float(own):
                continue
            for name, weight in list(vars(part).items()):
                if isinstance(weight, Tensor) and name in own._parameters and _is_lent(weight):
                    vars(part)[name] = weight.to(self.dtype)
            if isinstance(part, nn.RNNBase):
                list_weights(part)

    # Where Dynamo traces

    def _put_traced(self, root: nn.Module) -> None:
        """As `begin`, found anew: Dynamo guards on what it has read, and a tree may be old."""
        places = self.places_in(root)
        copies: dict[int, Tensor] = {}
        for table, name, weight in places:
            if id(weight) not in copies:
                copies[id(weight)] = weight.to(self.dtype)
            table[name] = copies[id(weight)]
        self.traced.append((root, places))

    def _take_back_traced(self) -> None:
        _, places = self.traced.pop()
        for table, name, parameter in places:
            table[name] = parameter
