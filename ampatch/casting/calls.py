"""What runs in a thread, and which policy is in force there.

Calls of managed models, of their submodules and of module overrides, blocks of the user's, regions
of torch.autocast, recomputations, backwards of custom Functions and optimizer steps are one `Call`
each, on one stack for each thread, the innermost last.  A call says which policy is in force, which
half copies serve, what is lent, and what its end gives back.  Nothing else records that a forward
runs, whose it is, or with what.

`CastState` begins and ends them.  Each call has a Python frame of its own, whose `try` ends it,
whatever exception passes: `models/own_frame` for modules, `CastState.within` for all else.  Only
`with` blocks have none, of the user's and of torch.autocast: `leave` ends them.

A function is cast under the process's policy, unless its thread is inside a call that has set a
policy of its own.  Patched functions ask at every call, so the state is plain attributes.
`torch.compile` guards on what it reads while tracing.  Its guards are right for plain attributes,
and for those that a `threading.local` subclass sets in `__init__`.  It freezes a class-level
default of a `threading.local` into the graph silently, and refuses a `ContextVar`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.compiler import is_dynamo_compiling

from ..torch_private.autocast import devices_on, half_type, switch_on, switched_off
from ..torch_private.devices import device_types
from ..torch_private.probes import current_backward_pass
from .handler_tables import HandlerTables

if TYPE_CHECKING:  # a policy has a cache, which looks at the calls
    from .policy import Policy

FOLLOW: Any = object()
"""Instead of a policy: the policy of the process is in force."""
KEEP: Any = object()
"""Instead of a policy or a dtype: what is in force stays."""

CALL = "call"
"""A call of a module."""
BLOCK = "block"
"""Code that ampatch runs under a policy, such as the recompute of a checkpoint."""
USER = "user"
"""A `with` block of the user's: it holds in managed models too."""
REGION = "region"
"""A region of torch.autocast."""
BACKWARD = "backward"
"""The backward of a Function with `custom_fwd`: `custom_bwd` brings back its forward's casts."""

_TRACED_REGION = "a region of torch.autocast that Dynamo traces"


class Ends(Protocol):
    """What a call has put somewhere."""

    def end(self) -> None:
        """Take it back.  May be called again."""


class Call:
    """One thing that runs.  It has no `__init__`, whose call would cost more than the rest."""

    owner: Any = None  # who has begun it
    kind = CALL
    is_traced = False  # by Dynamo: no inputs, no copies

    # In force from here upwards.
    policy: Any = FOLLOW
    copies: Any = None  # the `ForwardCopies` that serve at O1
    computes_in: Any = KEEP  # the dtype of half models and of overrides; None: any
    results_in: Any = KEEP  # the dtype of what submodules return in a framework's step; None: any

    # What began with it, for its end.
    sets_policy = False
    opened_copies: Any = None  # the `ForwardCopies`
    counted_by: Any = None  # the `CastState`, where `policy` is a reason to look at this thread
    looked_before = False  # whether functions did so before; where Dynamo traces
    autocast_off: Sequence[str] = ()  # device types on which torch's is off meanwhile
    lending: Any = None  # half copies in the places of weights
    traced_places: Ends | None = None  # the same where Dynamo traces
    removed_frames: Ends | None = None  # those of submodules
    input_casts: Any = None  # for what the forward writes into its inputs


class Here(threading.local):
    """The calls that run in this thread; `policy` and `copies` are those of the innermost."""

    def __init__(self) -> None:
        self.stack: list[Call] = []
        self.policy: Any = FOLLOW
        self.copies: Any = None


here = Here()


def innermost(owner: object) -> Call | None:
    """The innermost call that `owner` has begun."""
    for call in reversed(here.stack):
        if call.owner is owner:
            return call
    return None


def computes_in() -> Any:
    """The dtype in which the forward around this line computes; None: any, or there is none."""
    for call in reversed(here.stack):
        if call.computes_in is not KEEP:
            return call.computes_in
    return None


class CastState:
    """The policy of the process, and what begins and ends in each thread."""

    def __init__(self) -> None:
        self.process: Policy | None = None
        self.in_half_models: Policy | None = None  # `init` has functions of the user cast there too
        self.per_thread = False  # whether functions look at their own thread: see `acquire`
        self._users: set[Any] = set()  # why they do
        self._traced_users = 0  # the same where Dynamo traces
        self.lock = threading.RLock()
        if hasattr(os, "register_at_fork"):  # else another thread may hold it in the child for ever
            os.register_at_fork(
                before=self.lock.acquire,
                after_in_parent=self.lock.release,
                after_in_child=self.lock.release,
            )
        self.tables = HandlerTables()
        self.modes = 0  # threads that are in a TorchFunctionMode; users of `per_thread` too

    # Calls begin and end

    def begin(self, call: Call, owner: object) -> None:
        """A call begins; nothing changes until it is filled."""
        call.owner = owner
        call.policy, call.copies = here.policy, here.copies
        here.stack.append(call)

    def set_policy(
        self, call: Call, policy: Any, off: Sequence[str] = (), is_setting: bool = True
    ) -> None:
        """This thread is under `policy` until `call`, its innermost one, ends.

        `off`: device types on which torch's autocast is off meanwhile.  What is no setting is not
        seen by `innermost_setting`.
        """
        previous = here.policy
        in_force = self.process if previous is FOLLOW else previous
        holds = policy is None and call.kind == USER  # also in sessions that open inside
        call.sets_policy = is_setting and policy is not KEEP
        if policy is not KEEP and (policy is not in_force or holds) and policy is not previous:
            call.counted_by = self
            self.acquire(call)
            call.policy = here.policy = policy
        if off:
            call.autocast_off = off
            switched_off(off)

    def enter(
        self, policy: Any, kind: str = BLOCK, owner: object = None, off: Sequence[str] = ()
    ) -> None:
        """A block or region begins, which is under `policy`; `leave(owner)` ends it."""
        call = Call()
        call.kind = kind
        call.is_traced = is_dynamo_compiling()
        self.begin(call, owner)
        self.set_policy(call, policy, off)

    def leave(self, owner: object) -> None:
        """End the innermost block that `owner` has begun, if it has one in this thread."""
        call = innermost(owner)
        if call is not None:
            self.remove(call)

    def remove(self, call: Call) -> None:
        """End a call that lends nothing, and the blocks that have begun in it.

        Generators leave blocks in any order.  Where a call with a frame runs in it, this one alone
        is ended, and all others go on.
        """
        stack = here.stack
        if call not in stack:
            return
        above = stack[stack.index(call) + 1 :]
        if all(one.kind in (USER, REGION) for one in above):
            self.end(call)
            return
        if call.autocast_off:
            switch_on(call.autocast_off)
        stack.remove(call)
        if call.counted_by is not None:
            self.release(call)

    def end(self, call: Call) -> None:
        """End a call, and what has begun in it and has not ended.  May be called again."""
        stack = here.stack
        if call not in stack:
            return
        last = None
        while last is not call:
            last = stack[-1]
            if last.removed_frames is not None:
                last.removed_frames.end()
            if last.lending is not None:
                last.lending.end()
            if last.traced_places is not None:
                last.traced_places.end()
            if last.autocast_off:
                switch_on(last.autocast_off)
            if len(stack) > 1:
                here.policy, here.copies = stack[-2].policy, stack[-2].copies
            else:
                here.policy, here.copies = FOLLOW, None
            if last.counted_by is not None:
                self.release(last)
            del stack[-1]

    def within(
        self, begin: Callable[[Call], object], function: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        """`function(*args, **kwargs)` within a call that `begin(call)` begins and fills."""
        call = Call()
        try:
            try:
                begin(call)
                return function(*args, **kwargs)
            finally:
                self.end(call)
        except BaseException:
            self.end(call)  # again: Ctrl-C may have struck in the first
            raise

    def casts_off(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)` without casts, as what an optimizer's step computes."""
        return self.within(self._begin_without_casts, function, *args, **kwargs)

    def _begin_without_casts(self, call: Call) -> None:
        call.kind = BLOCK
        self.begin(call, self)
        self.set_policy(call, None)

    def casts_on(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """In what `casts_off` runs: `function(*args, **kwargs)` under the policy around that."""
        call = innermost(self)
        if call is None:
            return function(*args, **kwargs)
        self.end(call)
        try:
            return function(*args, **kwargs)
        finally:
            self._begin_without_casts(call)  # the frame of `casts_off` ends it

    # Policies

    def current(self) -> Policy | None:
        """The policy of a function called here and now; None: no casting."""
        if self.per_thread and here.policy is not FOLLOW:
            return here.policy
        return self.process

    def forward_policy(self) -> Policy | None:
        """The policy of a forward that begins here and now, and of what repeats it in backward."""
        policy = self.current()
        return policy if policy is None or policy.in_forwards is None else policy.in_forwards

    def policy_on(self, device: str) -> Policy | None:
        """`current()`, if calls with tensors on `device` are cast under it here and now."""
        policy = self.current()
        if policy is not None and policy.in_forwards is not None:
            in_backward = not is_dynamo_compiling() and current_backward_pass() != -1
            policy = None if in_backward else policy.in_forwards
        if policy is None or device not in (policy.devices or device_types()):
            return None
        return policy

    def half_dtype_of(self, device: str, args: tuple, kwargs: dict) -> torch.dtype | None:
        """What an operator that casts by itself is to take for half here; None: it casts nothing.

        In a forward of a half model or an override that is its dtype, elsewhere the policy's.
        """
        for call in reversed(here.stack):
            if call.kind != USER and call.computes_in not in (KEEP, None):
                return call.computes_in
            if call.sets_policy:
                break
        policy = self.current()
        if policy is None or not policy.casts_on(device):
            return None
        return policy.half_to if policy.gate is None or policy.gate(args, kwargs) else None

    def innermost_setting(self) -> tuple[Policy | None, bool]:
        """The policy that holds here, regions of torch.autocast aside, and whether the user set it.

        What the user sets, by `precision()` or `disable_casts()`, holds in managed models too.
        """
        for call in reversed(here.stack):
            if call.sets_policy and call.kind != REGION:
                policy = self.process if call.policy is FOLLOW else call.policy
                return policy, call.kind == USER
        return self.process, False

    def setting_of_forward(self, policy: Policy | None) -> tuple[Any, Sequence[str], bool]:
        """The arguments of `set_policy` for a managed forward that begins within other calls.

        The user's blocks of `disable_casts` and `precision` hold inside it too.  Regions of
        torch.autocast do not: the forward is inside them.  An enabled one gives the half type.
        """
        if here.policy is FOLLOW and policy is self.process:
            return KEEP, (), False
        setting, by_user = self.innermost_setting()
        if by_user:
            return KEEP if devices_on() else setting, (), False  # on: by a region inside the block
        on: list[str] = []
        if policy is not None and policy.gate is None:
            on = [device for device in devices_on() if policy.casts_on(device)]
        if policy is None or not on:
            return policy, (), True
        half = half_type(on[-1])
        if not is_dynamo_compiling():
            return policy.in_type(half), on, True
        # The graph keeps the region, which casts alone if the types differ.
        return policy if half is policy.half_to else None, (), True

    def instead_of_torch(self) -> Sequence[str]:
        """The device types on which torch's autocast is on: `off` for what ends its casts."""
        return () if is_dynamo_compiling() else devices_on()

    def enter_region(self, half: torch.dtype | None) -> None:
        """A region of torch.autocast, until `leave_region`: what Dynamo traces.

        Casts are off, unless torch's are on (`half`) and are to the same type as those here.
        """
        policy = self.current()
        if half is None or policy is None or policy.half_to is not half or policy.gate is not None:
            policy = None
        self.enter(policy, REGION, _TRACED_REGION)

    def leave_region(self) -> None:
        """Back to what `enter_region` found."""
        self.leave(_TRACED_REGION)

    def casts_here(self) -> bool:
        """Whether a session casts in this thread, or would cast without a block of the user's."""
        if self.process is not None:
            return True
        for call in here.stack:
            if call.policy is not None and call.policy is not FOLLOW:
                return True
        return False

    def lent(self) -> list[Any]:
        """What calls of this thread have in place of weights, the outermost first."""
        lendings = []  # a comprehension is a call before Python 3.12
        for call in here.stack:
            if call.lending is not None and call.lending.is_in_place:
                lendings.append(call.lending)
        return lendings

    def float_of(self, copy: Any) -> Any:
        """The FP32 weight with the values of `copy`, if a call of this thread has lent that."""
        for lending in self.lent():
            if (weight := lending.half.float_of(copy)) is not None:
                return weight
        return copy

    # Who needs functions to look at their own thread

    def acquire(self, user: Any) -> None:
        """Functions look at their own thread until `release(user)`.

        A call with a policy of its own needs that, and so does an observer that wants to see each
        cast.  Both may be called again: Ctrl-C may strike at any moment.
        """
        if is_dynamo_compiling():  # it traces attributes, not locks, and runs one thread
            user.looked_before, self.per_thread = self.per_thread, True
            self._traced_users += 1
            return
        with self.lock:
            self._users.add(user)
            self.per_thread = True

    def release(self, user: Any) -> None:
        """`user` needs it no longer."""
        if is_dynamo_compiling():
            self.per_thread = user.looked_before
            self._traced_users -= 1
            return
        with self.lock:
            if getattr(user, "is_traced", False):
                self._traced_users -= 1
            self._users.discard(user)
            self.per_thread = bool(self._users) or self._traced_users > 0
