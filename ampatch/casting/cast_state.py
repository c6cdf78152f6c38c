"""Which policy is in force: one for the process, and one for each thread that has its own.

A function is cast under the process's policy, unless its thread is inside a call that has set a
policy of its own: see `calls`.  Here calls begin and end.

Patched functions read the state on every call, so it is plain attributes.
`torch.compile` guards on what it reads while tracing.  Its guards are right for plain
attributes, and for those that a `threading.local` subclass sets in `__init__`.  It freezes
a class-level default of a `threading.local` into the graph silently, and refuses a
`ContextVar`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..torch_private.devices import device_types
from ..torch_private.probes import current_backward_pass
from .calls import (
    BLOCK,
    FOLLOW,
    KEEP,
    REGION,
    USER,
    Call,
    calling_frame,
    here,
    innermost,
    is_running,
)
from .handler_tables import HandlerTables
from .policy import Policy
from .torch_autocast import devices_on, half_type, switch_on, switched_off

_TRACED_REGION = "a region of torch.autocast that Dynamo traces"


class CastState:
    """The policy of the process, and what begins and ends in each thread."""

    def __init__(self) -> None:
        self.process: Policy | None = None
        self.in_half_models: Policy | None = None  # `init` has functions of the user cast there too
        self.per_thread = False  # whether functions look at their own thread: see `watch`
        self.reasons = 0  # why they do
        self.lock = threading.RLock()
        if hasattr(os, "register_at_fork"):  # else another thread may hold it in the child for ever
            os.register_at_fork(
                before=self.lock.acquire,
                after_in_parent=self.lock.release,
                after_in_child=self.lock.release,
            )
        self.tables = HandlerTables()
        self.modes = 0  # threads that are in a TorchFunctionMode; counted in `per_thread` too
        self.casts_off = CastsOff(self)  # for the optimizer's step: one object for all

    # Calls begin and end

    def begin(self, begun_by: object, module: Any, caller: FrameType | None = None) -> Call:
        """A call of a module begins, which `begun_by` will end; nothing changes until it is filled.

        `caller`: the frame that makes the call, where that is not the innermost of others' frames.
        """
        call = Call()
        call.begun_by, call.module = begun_by, module
        if is_dynamo_compiling():
            call.is_traced = True
        else:
            if here.stack:
                call.is_recursive = innermost(begun_by, module) is not None
            call.caller = caller or calling_frame()
        call.policy, call.copies = here.policy, here.copies
        here.stack.append(call)
        return call

    def set_policy(
        self, call: Call, policy: Any, off: Sequence[str] = (), is_setting: bool = True
    ) -> None:
        """This thread is under `policy` until `call`, its innermost one, ends.

        `off`: device types on which torch's autocast is off meanwhile.  What is no setting is not
        seen by `innermost_setting`.
        """
        found = here.policy
        in_force = self.process if found is FOLLOW else found
        holds = policy is None and call.kind == USER  # also in sessions that open inside
        call.sets_policy = is_setting and policy is not KEEP
        if policy is not KEEP and (policy is not in_force or holds) and policy is not found:
            # Counted first: Ctrl-C may leave a reason too many, which costs time, but none too few.
            self.watch(+1)
            call.counted_by = self
            call.policy = here.policy = policy
        if off:
            call.autocast_off = off
            switched_off(off)

    def enter(
        self,
        policy: Any,
        kind: str = BLOCK,
        begun_by: object = None,
        off: Sequence[str] = (),
        caller: FrameType | None = None,
    ) -> Call:
        """A block or region begins, which is under `policy`; `begun_by` is for `leave`.

        Without a `caller` nothing tells later that an exception has ended it: leave it then.
        """
        call = Call()
        if is_dynamo_compiling():
            call.is_traced = True
        else:
            call.caller = caller
            if here.stack:
                self.end_abandoned()
        call.kind, call.begun_by = kind, begun_by
        call.policy, call.copies = here.policy, here.copies
        here.stack.append(call)
        self.set_policy(call, policy, off)
        return call

    def leave(self, begun_by: object) -> None:
        """End the innermost block that `begun_by` has begun, if it has one in this thread."""
        call = innermost(begun_by)
        if call is not None:
            self.remove(call)

    def remove(self, call: Call) -> None:
        """End a call that lends nothing; module calls that run in it go on as they began."""
        stack = here.stack
        above = () if stack[-1] is call else stack[stack.index(call) + 1 :]
        if not any(one.caller is not None and is_running(one.caller) for one in above):
            self.end(call)
            return
        if call.autocast_off:
            switch_on(call.autocast_off)
        stack.remove(call)
        if call.counted_by is not None:
            self.watch(-1)

    def end(self, call: Call) -> None:
        """End a call, and what has begun in it and has not ended.  May be called again."""
        stack = here.stack
        if call not in stack:
            return
        last = None
        while last is not call:
            last = stack[-1]
            if last.removed_hooks is not None:  # before others may have their turn
                last.removed_hooks.end()
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
                last.counted_by = None
                self.watch(-1)
            del stack[-1]
            last.caller = None  # the frame may hold the call, and much else

    def end_abandoned(self) -> None:
        """End calls of this thread whose frames run no longer, and what has begun in them."""
        for call in reversed(list(here.stack)):
            if call.caller is not None:
                if is_running(call.caller):
                    return
                self.end(call)

    def call_to_end(self, begun_by: object, module: Any) -> Call | None:
        """The call that ends now, of those that `begun_by` has begun for the module."""
        if is_dynamo_compiling():
            return innermost(begun_by, module, is_traced=True)
        # Torch runs hooks for an exception after the frame that made the call has ended.
        if sys.exc_info()[1] is None and innermost(begun_by, module) is not None:
            self.end_abandoned()
        return innermost(begun_by, module)

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

    @contextlib.contextmanager
    def casts_on(self) -> Iterator[None]:
        """Context manager inside `casts_off`: the policy around that block is in force again."""
        call = innermost(self.casts_off)
        caller = None if call is None else call.caller
        self.leave(self.casts_off)
        try:
            yield
        finally:
            self.enter(None, begun_by=self.casts_off, caller=caller)

    def casts_here(self) -> bool:
        """Whether a session casts in this thread, or would cast without a block of the user's."""
        if self.process is not None:
            return True
        for call in here.stack:
            if call.policy is not None and call.policy is not FOLLOW:
                return True
        return False

    def lent(self) -> list[Any]:
        """The half copies that calls of this thread have in place, the outermost first."""
        found = []  # a comprehension is a call before Python 3.12
        for call in here.stack:
            if call.lending is not None and call.lending.is_in_place:
                found.append(call.lending.half)
        return found

    def float_of(self, copy: Any) -> Any:
        """The FP32 weight with the values of `copy`, if a call of this thread has lent that."""
        for copies in self.lent():
            if (found := copies.float_of(copy)) is not None:
                return found
        return copy

    def watch(self, change: int) -> None:
        """Add to (+1) or take from (-1) the reasons why functions must look at their own thread.

        A thread's own policy is one, and so is an observer that wants to see each cast.
        """
        if is_dynamo_compiling():  # it traces attributes, not locks, and runs one thread
            self.reasons += change
            self.per_thread = self.reasons > 0
            return
        with self.lock:
            self.reasons += change
            self.per_thread = self.reasons > 0


class CastsOff:
    """A `with` statement: no casts inside.  One may be entered many times, in several threads."""

    __slots__ = ("_state",)

    def __init__(self, state: CastState) -> None:
        self._state = state

    def __enter__(self) -> None:
        caller = None if is_dynamo_compiling() else sys._getframe(1)
        self._state.enter(None, begun_by=self, caller=caller)

    def __exit__(self, *exception: object) -> None:
        self._state.leave(self)
