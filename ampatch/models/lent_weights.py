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
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ..casting.cast_state import CastState
from ..casting.kept_copies import KeptCopies
from ..casting.stack import is_running
from ..torch_private.modules import (
    REPLICA,
    list_weights,
    register_load_hook,
    register_state_dict_hook,
)
from .hooks import Hook
from .lending import Lending
from .lent_casts import LentCasts
from .lent_places import Place, StaysFloat, Tree, all_places, lent_of
from .lent_writes import LentWrites
from .turns import Turns

lenders: weakref.WeakValueDictionary[int, LentWeights] = weakref.WeakValueDictionary()
"""By the ids of their models, which they hold."""

_registration_hooks: list[Any] = []  # of torch's, while there are lenders


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
        running = lender.running
        found = None if running is None else running.behind.get(id(tensor))
        if found is not None:
            return found
    return None


def _note_registration(module: nn.Module, name: str, value: Any) -> None:
    """A module gets a parameter or a submodule, perhaps in a forward of the model that it is in."""
    for lender in list(lenders.values()):
        lender.note_registration(module, value)


def _watch_registrations() -> None:
    """Have torch tell of registrations while there are lenders."""
    one = next(iter(lenders.values()), None)  # the length may count one that has just died
    are_there = one is not None
    if are_there and not _registration_hooks:
        _registration_hooks.append(register_module_parameter_registration_hook(_note_registration))
        _registration_hooks.append(register_module_module_registration_hook(_note_registration))
    while _registration_hooks and not are_there:
        _registration_hooks.pop().remove()


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
        at_change: Callable[[], object],
    ) -> None:
        self._model = model
        self.dtype = dtype
        self._stays_float = stays_float
        self._leave = leave
        self._left: Collection[int] = ()  # what `leave` has said
        self._state = state
        self._at_change = at_change
        self._trees: dict[int, Tree] = {}  # by the ids of their roots
        self.known: set[int] = set()  # ids of the weights of the whole model, when last looked at
        self.has_changed = False  # the model has got parameters or parts since
        self._turns = Turns(type(model).__name__, self._end)
        self.casts = LentCasts(model, dtype, kept)
        self.writes = LentWrites(model)
        self._kept = kept  # while it is open, they serve all forwards that record no graph
        self.running: Lending | None = None
        self._roots: list[nn.Module] = []  # of the calls that run, the outermost first
        # What calls that Dynamo traces have exchanged, the outermost first.
        self.traced: list[tuple[nn.Module, list[Place]]] = []
        # Plain: Dynamo compiles frames of a weak dictionary's methods.
        self._hooked: dict[nn.Module, tuple[Any, Any]] = {}
        lenders[id(model)] = self
        _watch_registrations()
        weakref.finalize(self, _watch_registrations)
        self._tree_of(model)

    # Where the weights are

    def _tree_of(self, root: nn.Module) -> Tree:
        """The places of the model, or of a part of it, as they are now."""
        tree = self._trees.get(id(root))
        if tree is None or tree.root is not root or not tree.is_valid():
            self._left = self._leave()
            tree = self.part(root)
            self._watch_state_dicts(root)
            if not self._state.thread.lent:  # else copies of another model may be in the places
                self._trees[id(root)] = tree
                if root is self._model:
                    self.known = tree.ids
        return tree

    def part(self, root: nn.Module) -> Tree:
        """Where FP32 weights stand in a part of the model, which may be new."""
        return Tree(root, self._stays_float, self._left)

    def ids(self) -> set[int]:
        """Of the weights that the forward computes with half copies of."""
        if self.has_changed and self.running is None:
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
                self._hooked[module] = (
                    register_state_dict_hook(module, Hook(_save_parameters)),
                    register_load_hook(module, Hook(self._before_load)),
                )

    def _before_load(self, *args: Any) -> None:
        """A checkpoint is about to be loaded, perhaps after a forward that Ctrl-C has ended."""
        self._state.end_interrupted()

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

    def look(self) -> None:
        """A forward of the model is about to begin, which has other parameters or parts by now."""
        if self.running is None:
            self.has_changed = False
            self._tree_of(self._model)
            self._at_change()

    # Around a call

    def begin(self, root: nn.Module, is_traced: bool) -> None:
        """A call of the model or of a part of it begins; the outermost one lends.

        `is_traced`: by Dynamo.
        """
        if is_traced:
            self._begin_traced(root)
            return
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
        self._turns.begin(thread.itself)
        try:
            if self._kept.is_open:
                self._kept.check()
            lending = Lending(self._tree_of(root), self, thread.itself)
            self.running, self._roots = lending, [root]
            thread.lent.append(lending)
            lending.tree.put(lending.copies)
            lending.is_in_place = True
        except BaseException:
            self._end()
            raise

    def end(self, root: nn.Module, is_traced: bool) -> None:
        """A call has ended."""
        if is_traced:
            self._end_traced()
            return
        running = self.running
        if running is None or running.thread is not self._state.thread.itself:
            return
        if REPLICA in vars(root):
            return
        while self._roots and self._roots.pop() is not root:
            pass
        if not self._roots:
            self._end()

    def _end(self) -> None:
        lending, self.running, self._roots = self.running, None, []
        try:
            if lending is not None:
                if lending in self._state.thread.lent:
                    self._state.thread.lent.remove(lending)
                lending.take_back()
        finally:
            self._turns.end()

    def drop(self, lending: Lending) -> None:
        """End that call: it was interrupted."""
        if self.running is lending:
            self._end()

    @contextlib.contextmanager
    def reserved(self) -> Iterator[list[Any]]:
        """No other thread lends meanwhile; gives what is lent in this one."""
        with self._turns.reserved():
            yield self._state.thread.lent

    def is_joined(self, module: nn.Module) -> bool:
        """Whether the model, or a part of it, is in another one that lends in this thread.

        That one casts what goes in and out.
        """
        lent, running = self._state.thread.lent, self.running
        if not lent or (len(lent) == 1 and lent[0] is running):
            return False
        key = id(module)
        return any(key in lending.tree.modules for lending in lent if lending is not running)

    def close(self) -> None:
        """Nothing is lent any more."""
        if self.running is not None:
            self._end()
        self._trees.clear()
        if lenders.get(id(self._model)) is self:
            del lenders[id(self._model)]
        _watch_registrations()
        for handles in self._hooked.values():
            for handle in handles:
                handle.remove()

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
        places = lent_of(all_places(root, self._stays_float), self._left)
        copies: dict[int, Tensor] = {}
        for table, name, weight in places:
            if id(weight) not in copies:
                copies[id(weight)] = weight.to(self.dtype)
            table[name] = copies[id(weight)]
        self.traced.append((root, places))

    def _end_traced(self) -> None:
        for table, name, parameter in self.traced.pop()[1]:
            table[name] = parameter
