"""Which policy is in force: one for the process, and one for each thread that has its own.

A call is under the process's policy, unless its thread is inside something that has pushed a
policy of its own: see `stack`.

Patched functions read the state on every call, so it is plain attributes.
`torch.compile` guards on what it reads while tracing: on plain attributes and
on attributes that a `threading.local` subclass sets in `__init__` it guards
correctly (a class-level default of a `threading.local`, and a `ContextVar`, it
does not: the first is silently frozen into the graph, the second refused).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..torch_private.devices import device_types
from ..torch_private.probes import current_backward_pass
from .contexts import PolicyContext
from .handler_tables import HandlerTables
from .policy import Policy
from .stack import BLOCK, CALL, FOLLOW, REGION, USER, Block, Entry, is_running
from .torch_autocast import devices_on, half_type, switched_off


class _Thread(threading.local):
    def __init__(self) -> None:
        self.policy: Any = FOLLOW  # of the innermost entry
        self.stack: list[Entry] = []  # innermost last
        self.lent: list[Any] = []  # forwards of half models, with what is lent to them


def _is_user_s(entry: Entry) -> bool:
    """Whether it is a block of the user's that says something."""
    return entry.block.kind == USER and entry.policy is not FOLLOW


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

    def of_forward(self) -> Policy | None:
        """The policy of a forward that begins here and now, and of what repeats it in backward."""
        policy = self.current()
        return policy if policy is None or policy.of_forwards is None else policy.of_forwards

    def table_policy(self) -> Policy | None:
        """`current()` if it follows the tables; None: rows cast nothing here and now."""
        policy = self.process
        if self.per_thread:  # as `current()`, without the price of a call
            own = self.thread.policy
            if own is not FOLLOW:
                policy = own
        return policy if policy is not None and policy.follows_tables else None

    def policy_here(self) -> Policy | None:
        """`table_policy()`, with its gate answered where that depends on the place alone."""
        policy = self.table_policy()
        if policy is None or policy.of_forwards is None:
            return policy
        in_backward = not is_dynamo_compiling() and current_backward_pass() != -1
        return None if in_backward else policy.of_forwards

    def policy_on(self, device: str) -> Policy | None:
        """`policy_here()`, if calls with tensors on `device` are cast under it."""
        policy = self.policy_here()
        if policy is None or device not in (policy.devices or device_types()):
            return None
        return policy

    def enter_forward(self, policy: Policy | None, block: Block) -> None:
        """A managed forward begins inside something: `block` is in force until it is left.

        The user's blocks of `disable_casts` and `precision` hold inside it too.  Regions of
        torch.autocast do not: the innermost wins.  One that is enabled agrees that there are
        casts, and says the half type.
        """
        if not is_dynamo_compiling():
            self.drop_ended()
        if self.under_user_control():
            return
        said = self._said()
        on: list[str] = []
        if said is not None and _is_user_s(said):
            policy = said.policy
        elif policy is not None and policy.gate is None and policy.follows_tables:
            on = [device for device in devices_on() if policy.casts_on(device)]
        if policy is None or not on:
            block.enter(policy)
        elif not is_dynamo_compiling():
            block.enter(policy.in_type(half_type(on[-1])), switched_off(on))
        else:  # its graph keeps the region, which casts alone if the types differ
            block.enter(policy if half_type(on[-1]) is policy.half_to else None)

    def instead_of_torch(self) -> Sequence[str]:
        """Switch torch's autocast off, for what is not under it; to be given to `Block.enter`."""
        return () if is_dynamo_compiling() else switched_off(devices_on())

    def under(self, choose: Callable[[], Policy | None], by_user: bool = False) -> PolicyContext:
        """A context manager and decorator: the policy is `choose()`, asked at each entry.

        What is `by_user` holds inside managed models too, and instead of torch's own autocast.
        """
        return PolicyContext(self, choose, by_user)

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
        """Leave calls that never ended: Ctrl-C skips forward hooks.

        To be called where no managed forward can be running: around `scale_loss`, after a step,
        when a session closes.
        """
        stack = self.thread.stack
        while stack and stack[-1].block.kind == CALL:
            stack[-1].block.leave()
        self.end_interrupted()

    def end_interrupted(self) -> None:
        """Take back what was lent to forwards of this thread that never ended."""
        for lending in list(self.thread.lent):
            lending.end_if_interrupted()

    def drop_ended(self) -> None:
        """Leave calls that run no longer: Ctrl-C skips forward hooks."""
        stack = self.thread.stack
        while stack and stack[-1].caller is not None and not is_running(stack[-1].caller):
            stack[-1].block.leave()

    def beneath_regions(self) -> Policy | None:
        """The policy in force here, but for regions of torch.autocast that were entered last."""
        said = self._said()
        return self.process if said is None else self._resolved(said)

    def under_user_control(self) -> bool:
        """Whether the user has said what is in force here, for managed models inside too.

        A region of torch.autocast that is on within such a block holds as the block does.
        """
        stack = self.thread.stack
        if not stack or stack[-1].block.kind != REGION:
            return bool(stack) and _is_user_s(stack[-1])
        said = self._said()
        return said is not None and _is_user_s(said) and bool(devices_on())

    def casts_here(self) -> bool:
        """Whether a session casts in this thread, or would but for a block of the user's."""
        if self.process is not None:
            return True
        for entry in self.thread.stack:
            if entry.policy is not None and entry.policy is not FOLLOW:
                return True
        return False

    def covered_by_user(self) -> bool:
        """Whether what the innermost entry here covers is a block of the user's."""
        beneath = self.thread.stack[-2:-1]
        return bool(beneath) and _is_user_s(beneath[0])

    def covered(self) -> Policy | None:
        """The policy that the innermost entry here covers; without one, that of the process."""
        beneath = self.thread.stack[-2:-1]
        return self._resolved(beneath[0]) if beneath else self.process

    def _said(self) -> Entry | None:
        """The innermost entry here that is no region of torch.autocast."""
        for entry in reversed(self.thread.stack):
            if entry.block.kind != REGION:
                return entry
        return None

    def _resolved(self, entry: Entry) -> Policy | None:
        return self.process if entry.policy is FOLLOW else entry.policy

    def watch(self, change: int) -> None:
        """Add to (+1) or take from (-1) the reasons why calls must look at their own thread.

        A thread's own policy is one, and so is an observer that wants to see each cast.
        """
        if is_dynamo_compiling():
            self.reasons += change
            self.per_thread = self.reasons > 0
            return
        with self.lock:
            self.reasons += change
            self.per_thread = self.reasons > 0
