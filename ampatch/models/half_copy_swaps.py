"""O2: half copies are in the slots of a model's FP32 weights while a forward runs.

A weight exists once, in FP32, as the model's parameter, which the optimizer has too.  When the
outermost call of the model, or of a submodule, begins, half copies are put in the parameters' slots
in `module._parameters`; when it ends, the parameters are put back.

Nodes of the graph and checkpoints keep half copies (`SlotCopies`).  A `Swap` puts them in the slots
during one `Call`.  Its states:

    state       in `swaps`  `may_hold_copies`  `is_swapped_in`  the slots hold  left by
    begun       yes         no                 no               parameters      swap_in, swap_out
    partial     yes         yes                no               both            swap_in, swap_out
    swapped in  yes         yes                yes              copies          swap_out
    ended       no          no                 no               parameters      nothing

An exception may be raised between any two states: `may_hold_copies` is set before the first copy is
put in its slot and reset after the last parameter is back.  `swap_out` may be called in each state,
and again: if it was interrupted, the swap is no longer in `swaps`, and the call's second exit
finishes it.  A nested swap finds the copies in the slots: it is "swapped in", but not in `swaps`,
and its `may_hold_copies` stays False.  All threads share the slots, so all swaps of a model belong
to one thread.  While they run, a forward in another thread raises `AmpatchError`.  At O3 there are
no copies: `may_hold_copies` stays False.

FSDP2 (`MixedPrecisionPolicy`) treats unsharded parameters in this way.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection
from threading import get_ident
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..casting.calls import Call, thread_calls
from ..casting.half_copies import are_partly_wanted
from ..errors import AmpatchError
from ..torch_private.modules import IS_REPLICA_ATTRIBUTE, swap_parametrize_cache
from ..torch_private.probes import is_fake_mode_on, is_traced_or_transformed
from .embeddings import EmbeddingParameters
from .half_copy_slots import (
    CopyWriteBack,
    Fp32Predicate,
    Slot,
    SlotCopies,
    WeightSlots,
    cast_replica,
    fp32_slots,
    parameter_dicts,
    put_while_traced,
    slots_of,
)
from .sharded_weights import sharded_parameters

swappers: weakref.WeakValueDictionary[int, HalfCopySwapper] = weakref.WeakValueDictionary()
"""The open swappers, by the id of their model.  They keep the model alive: the id is not reused."""


def half_copy_dtypes(module: nn.Module) -> dict[int, torch.dtype]:
    """By the id of each weight of `module`: the dtype of its half copies, if models make any."""
    param_ids = set(map(id, module.parameters()))
    dtypes: dict[int, torch.dtype] = {}
    for swapper in list(swappers.values()):
        dtypes.update(dict.fromkeys(param_ids & swapper.weight_ids(), swapper.dtype))
    return dtypes


def parameter_of_copy(tensor: Tensor) -> Tensor | None:
    """The parameter of a half copy, or None if `tensor` is not a half copy of a running swap."""
    for swapper in list(swappers.values()):
        for swap in list(swapper.swaps):
            parameter = None if swap.slot_copies is None else swap.slot_copies.parameter_of(tensor)
            if parameter is not None:
                return parameter
    return None


def record_values(tensor: Tensor) -> None:
    """Record the values of `tensor` if it is a half copy; called before access to its `.data`."""
    if is_dynamo_compiling() or is_traced_or_transformed() or is_fake_mode_on():
        return
    for call in thread_calls.stack:
        if call.swap is not None and call.swap.is_swapped_in:
            call.swap.slot_copies.record_values(tensor)  # type: ignore[union-attr]


def is_fx_traced(args: tuple, kwargs: dict) -> bool:
    """Whether `torch.fx` calls a module on proxies, to trace it."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.fx.Proxy):
            return True
    return False


def enclosing_swap(module: nn.Module) -> Swap | None:
    """The innermost swap in this thread whose forward or recompute computes `module`."""
    for call in reversed(thread_calls.stack):
        swap = call.swap
        if swap is not None and swap.is_swapped_in and id(module) in swap.weight_slots.module_ids:
            return swap
    return None


class Swap:
    """Keeps half copies in the slots of weights during one call."""

    slot_copies: SlotCopies | None = None
    weight_slots: WeightSlots
    is_nested = False  # another running swap has put the same copies in, and takes them out

    def __init__(self, swapper: HalfCopySwapper) -> None:
        self.swapper = swapper
        self.may_hold_copies = False  # some slots may hold copies
        self.is_swapped_in = False  # all slots hold copies (at O3: half parameters)
        # The tensors that the slots held before, if not the parameters.
        self._previous_tensors: list[Any] | None = None
        # The cache of a `parametrize.cached()` block around the swap.
        self._outer_parametrize_cache: dict | None = None
        self._embeddings: list[EmbeddingParameters] = []

    def swap_in(self, slot_copies: SlotCopies, previous: list[Any] | None = None) -> None:
        """Put copies in the slots; `previous`: the tensors there, if not the parameters."""
        weight_slots = self.weight_slots
        self._previous_tensors = previous
        self.may_hold_copies = True
        if weight_slots.embeddings:
            copy_of = dict(zip(map(id, slot_copies.parameters), slot_copies.copies))
            for params in weight_slots.embeddings:
                self._embeddings.append(params)
                copy = copy_of.get(id(params.parameter))
                params.swap_in(self.swapper.dtype, copy, self._add_copy)
        weight_slots.put(slot_copies.copies)
        self._outer_parametrize_cache = swap_parametrize_cache({})
        self.is_swapped_in = True

    def swap_in_again(self, call: Call) -> None:
        """Swap the same copies in until `call` ends, for a recompute or a backward pass."""
        swapper, slot_copies = self.swapper, self.slot_copies
        assert slot_copies is not None
        swaps = [swap for swap in swapper.swaps if swap.slot_copies is slot_copies]
        call.swap = new = Swap(swapper)
        new.weight_slots = self.weight_slots
        new.slot_copies = slot_copies
        # A forward of this thread, or of the thread that waits for this one, may have swapped the
        # copies in already.
        if any(swap.is_swapped_in for swap in swaps):
            new.is_swapped_in = new.is_nested = True
            return
        swapper.claim_slots(new)
        if new.weight_slots.weight_ids:
            new.swap_in(slot_copies, previous=new.weight_slots.present_tensors())
        else:
            new.is_swapped_in = True

    def _add_copy(self, parameter: Tensor, copy: Tensor) -> None:
        assert self.slot_copies is not None
        self.slot_copies.add(parameter, copy)

    def swap_out(self) -> None:
        """Put the previous tensors back in the slots.  May be called again."""
        swapper, slot_copies, previous = self.swapper, self.slot_copies, self._previous_tensors
        self.is_swapped_in = False
        try:
            if self.may_hold_copies and slot_copies is not None:
                weight_slots = self.weight_slots
                if previous is None:
                    weight_slots.put(weight_slots.parameters, instead_of=slot_copies.copies)
                else:
                    weight_slots.put_by_slot(previous)
                for params in self._embeddings:
                    params.swap_out(self._add_copy)
                if self._outer_parametrize_cache is not None:  # computed from FP32 parameters
                    swap_parametrize_cache(self._outer_parametrize_cache)
                self.may_hold_copies = False
            if previous is None and not self.is_nested and slot_copies and slot_copies.copies:
                slot_copies.write_changes_back(swapper.write_back)
        finally:
            if self in swapper.swaps:
                swapper.swaps.remove(self)
            if not swapper.swaps and swapper.thread_claim.get("thread") == get_ident():
                swapper.thread_claim.clear()


class HalfCopySwapper:
    """Swaps half copies, in `dtype`, into the slots of one model's FP32 weights, and out of them.

    Weights of modules for which `stays_fp32` is true are left out, and weights that FSDP2 shards.
    `on_change()` is called by `open`, and when a forward begins after parameters or submodules of
    the model were replaced.

    At O3 the weights are half.  A `Swap` holds no copies then; it records which modules belong to
    the running forward.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        stays_fp32: Fp32Predicate,
        on_change: Callable[[], object],
    ) -> None:
        self.model = model
        self.dtype = dtype
        self._stays_fp32 = stays_fp32
        self._excluded_ids: Collection[int] = ()
        self._on_change = on_change
        # By the id of the root module; a `WeightSlots` holds its root, so that the id stays valid.
        self._weight_slots: dict[int, WeightSlots] = {}
        self.wants_own_nodes = False  # the next forward makes one node per weight
        self.has_own_nodes = False  # the last forward made one node per weight
        # Ids of the model's weights, from the newest `WeightSlots` of the model.
        self._weight_ids: set[int] = set()
        self.write_back = CopyWriteBack(model)
        self.swaps: list[Swap] = []  # the running swaps, the innermost last
        # {"thread": ident of the thread that owns the slots}, or {} if no forward runs.  It is a
        # dict because `setdefault` is atomic.
        self.thread_claim: dict[str, int] = {}

    def open(self) -> None:
        """Have the model's forwards compute with half copies of its FP32 weights, until `close`."""
        swappers[id(self.model)] = self
        self._weight_slots.clear()
        self.weight_slots_of(self.model)

    def close(self) -> None:
        """Put the parameters in their slots for good."""
        self.swap_out_all()
        self._weight_slots.clear()
        if swappers.get(id(self.model)) is self:
            del swappers[id(self.model)]

    def swap_out_all(self) -> None:
        """Put the parameters in their slots, even if forwards are running."""
        for swap in reversed(list(self.swaps)):
            swap.swap_out()

    def weight_slots_of(self, root: nn.Module) -> WeightSlots:
        """The `WeightSlots` of the model or of a submodule, valid now."""
        newest = self._weight_slots.get(id(root))
        if newest is not None and newest.is_valid():
            return newest
        self._excluded_ids = sharded_parameters(self.model)
        weight_slots = WeightSlots(root, self.model, self._stays_fp32, self._excluded_ids)
        # While a swap runs, slots may hold half copies of another model: do not keep the list.
        for call in thread_calls.stack:
            if call.swap is not None and call.swap.is_swapped_in:
                return weight_slots
        self._weight_slots[id(root)] = weight_slots
        if root is self.model:
            # Drops the WeightSlots of submodules, which may be gone.
            self._weight_slots = {id(root): weight_slots}
            self._weight_ids = weight_slots.weight_ids
            self._on_change()
        return weight_slots

    def weight_ids(self) -> set[int]:
        """Ids of the weights of which the model's forward has half copies."""
        if not self.swaps:
            self.weight_slots_of(self.model)
        return self._weight_ids

    def record_wanted_grads(self, wanted: Collection[int]) -> bool:
        """Like `WeightUsage.record_wanted_grads`, for half copies in slots."""
        if self.has_own_nodes:
            return False
        all_slots = list(self._weight_slots.values())
        only_some = any(are_partly_wanted(slots.parameters, wanted) for slots in all_slots)
        self.wants_own_nodes |= only_some
        return only_some

    # Enter a call

    def swap_in(self, call: Call, root: nn.Module) -> None:
        """Swap copies in until `call` exits; `root` is the model or the submodule called."""
        if IS_REPLICA_ATTRIBUTE in vars(root):
            cast_replica(self.model, root, self.dtype, self._stays_fp32)
            return
        call.swap = swap = Swap(self)
        self.claim_slots(swap)
        swap.weight_slots = weight_slots = self.weight_slots_of(root)
        swap.slot_copies = slot_copies = SlotCopies(weight_slots, self.dtype, self.wants_own_nodes)
        self.has_own_nodes = self.wants_own_nodes
        if weight_slots.weight_ids:
            swap.swap_in(slot_copies)
        else:  # at O3, and in FP32 submodules
            swap.is_swapped_in = True

    def swap_in_traced(self, root: nn.Module) -> TracedSlots | None:
        """Like `swap_in`, while Dynamo traces.  Returns None if no slot gets a copy.

        Lists the slots anew each time, because Dynamo guards on every object that it reads.
        """
        if not self._weight_ids:
            return None
        slots = fp32_slots(slots_of(parameter_dicts(root, self._stays_fp32)), self._excluded_ids)
        put_while_traced(slots, self.dtype)
        return TracedSlots(slots)

    def claim_slots(self, swap: Swap) -> None:
        """Claim the slots for this thread, before a forward or a recompute of it.

        Raises `AmpatchError` while another thread runs a forward: both would use the same slots.
        """
        current = get_ident()
        if self.thread_claim.setdefault("thread", current) != current:
            raise AmpatchError(self._two_threads_message())
        self.swaps.append(swap)

    def _two_threads_message(self) -> str:
        name = type(self.model).__name__
        return (
            f"{name}: a forward of the model or of a submodule begins in thread "
            f"{threading.current_thread().name!r} while another thread runs a forward of the same "
            "model. At O2 and O3 a model serves one thread at a time. Give each thread a model of "
            'its own, copy.deepcopy(model), or take opt_level="O1", which threads may share. '
            "Submodules may be computed in threads within a forward of the whole model."
        )


class TracedSlots:
    """The slots that hold half copies during a call that Dynamo traces."""

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots

    def swap_out(self) -> None:
        """Put the parameters back."""
        for container, name, parameter in self._slots:
            container[name] = parameter


def _forget_other_threads() -> None:
    """Release claims of other threads in the child of a fork, where these threads do not exist."""
    for swapper in list(swappers.values()):
        if swapper.thread_claim.get("thread") not in (None, get_ident()):
            swapper.swap_out_all()
            swapper.thread_claim.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)
