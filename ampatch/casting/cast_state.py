"""Which policy is in force: one for the process, and one for each thread that has its own.

A call is under the process's policy, unless its thread is inside something that has pushed a
policy of its own: see `stack`.

Patched functions read the state on every call, so it is plain attributes.
`torch.compile` guards on what it reads while tracing.  Its guards are right for plain
attributes, and for those that a `threading.local` subclass sets in `__init__`.  It freezes
a class-level default of a `threading.local` into the graph silently, and refuses a
`ContextVar`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..torch_private.devices import device_types
from ..torch_private.probes import current_backward_pass
from .handler_tables import HandlerTables
from .policy import Policy
from .stack import BLOCK, FOLLOW, KEEP, REGION, USER, Block, Entry, is_running
from .torch_autocast import devices_on, half_type, switched_off


class _Thread(threading.local):
    def __init__(self) -> None:
        self.policy: Any = FOLLOW  # of the innermost entry
        self.stack: list[Entry] = []  # innermost last
        self.lent: list[Any] = []  # forwards of half models, with what is lent to them


class CastState:
    """The policy of the process, and each thread's own where it has one."""

    def __init__(self) -> None:
        self.process: Policy | None = None
        self.per_thread = False  # whether calls look at their own thread: see `watch`
        self.reasons = 0  # why they do
        self.lock = threading.Lock()
        self.tables = HandlerTables()
        self.modes = 0  # threads that are in a TorchFunctionMode; counted in `per_thread` too
        self.thread = _Thread()
        self.casts_off = Block(self, BLOCK)  # for the optimizer's step: one object for all
        self._traced_region = Block(self, REGION)

    def current(self) -> Policy | None:
        """The policy of a call made here and now; None: no casting."""
        if self.per_thread and self.thread.policy is not FOLLOW:
            return self.thread.policy
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

    def innermost_setting(self) -> tuple[Policy | None, bool]:
        """The policy that holds here, regions of torch.autocast aside, and whether the user set it.

        What the user sets, by `precision()` or `disable_casts()`, holds in managed models too.
        """
        for block, policy, *_ in reversed(self.thread.stack):
            if block.kind != REGION:
                if policy is FOLLOW:
                    return self.process, False
                return policy, block.kind == USER
        return self.process, False

    def enter_forward(self, policy: Policy | None, block: Block) -> None:
        """A managed forward begins, and the thread's stack has entries: enter `block`.

        The user's blocks of `disable_casts` and `precision` hold inside it too.  Regions of
        torch.autocast do not: the forward is inside them.  An enabled one gives the half type.
        """
        if not is_dynamo_compiling():
            self.drop_ended()
        setting, by_user = self.innermost_setting()
        on: list[str] = []
        if by_user:
            if self.thread.stack[-1].block.kind == USER or devices_on():  # by a region inside it
                block.enter(KEEP)
                return
            policy = setting
        elif policy is not None and policy.gate is None:
            on = [device for device in devices_on() if policy.casts_on(device)]
        if policy is None or not on:
            block.enter(policy)
        elif not is_dynamo_compiling():
            block.enter(policy.in_type(half_type(on[-1])), switched_off(on))
        else:  # its graph keeps the region, which casts alone if the types differ
            block.enter(policy if half_type(on[-1]) is policy.half_to else None)

    def instead_of_torch(self) -> Sequence[str]:
        """Switch torch's autocast off.  Returns `off` for `Block.enter`: where it was on."""
        return () if is_dynamo_compiling() else switched_off(devices_on())

    def enter_region(self, half: torch.dtype | None) -> None:
        """A region of torch.autocast, until `leave_region`: what Dynamo traces.

        Casts are off, unless torch's are on (`half`) and are to the same type as those here.
        """
        policy = self.current()
        if half is None or policy is None or policy.half_to is not half or policy.gate is not None:
            policy = None
        self._traced_region.enter(policy)

    def leave_region(self) -> None:
        """Back to what `enter_region` found."""
        self._traced_region.leave()

    def drop_interrupted(self) -> None:
        """Leave calls that run no longer, and take back what was lent to them."""
        self.drop_ended()
        self.end_interrupted()

    def end_interrupted(self) -> None:
        """Take back what was lent to forwards of this thread that never ended."""
        for lending in list(self.thread.lent):
            lending.end_if_interrupted()

    def drop_ended(self) -> None:
        """Leave calls that run no longer, and what was entered in them: Ctrl-C skips hooks."""
        for entry in reversed(list(self.thread.stack)):
            if entry.caller is not None and not is_running(entry.caller):
                entry.block.leave()

    @contextlib.contextmanager
    def casts_on(self) -> Iterator[None]:
        """Context manager inside `casts_off`: the policy around that block is in force again."""
        self.casts_off.leave()
        try:
            yield
        finally:
            self.casts_off.enter()

    def casts_here(self) -> bool:
        """Whether a session casts in this thread, or would cast without a block of the user's."""
        if self.process is not None:
            return True
        for entry in self.thread.stack:
            if entry.policy is not None and entry.policy is not FOLLOW:
                return True
        return False

    def float_of(self, copy: Any) -> Any:
        """The FP32 weight with the values of `copy`, if this thread's forward has lent that."""
        for lending in self.thread.lent:
            if lending.is_in_place and (found := lending.float_of(copy)) is not None:
                return found
        return copy

    def watch(self, change: int) -> None:
        """Add to (+1) or take from (-1) the reasons why calls must look at their own thread.

        A thread's own policy is one, and so is an observer that wants to see each cast.
        """
        if is_dynamo_compiling():  # it traces attributes, not locks, and runs one thread
            self.reasons += change
            self.per_thread = self.reasons > 0
            return
        with self.lock:
            self.reasons += change
            self.per_thread = self.reasons > 0
