"""Which policy is in force: one for the process, and one for each thread that has its own.

A call is under the process's policy, unless its thread is inside a managed model,
`disable_casts()` or `precision()`.

Patched functions read the state on every call, so it is plain attributes.
`torch.compile` guards on what it reads while tracing: on plain attributes and
on attributes that a `threading.local` subclass sets in `__init__` it guards
correctly (a class-level default of a `threading.local`, and a `ContextVar`, it
does not: the first is silently frozen into the graph, the second refused).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..torch_private.devices import device_types
from ..torch_private.probes import current_backward_pass
from .calling_frames import calling_frame, is_running
from .contexts import PolicyContext
from .handler_tables import HandlerTables
from .policy import Policy
from .torch_autocast import devices_on, half_type, nesting, set_enabled

_OURS = __name__.partition(".")[0] + "."

FOLLOW = object()
"""The thread has no policy of its own: the process's policy counts."""

Frame = tuple[Any, Any, bool, "SwitchedOff | None", FrameType | None]
"""The owner of a push, what it covered, whether it changed anything, torch's autocast meanwhile,
and the Python frame that calls the module whose hook pushed.

A plain tuple: each forward and each step makes several, and a class's constructor is a call.
"""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.policy: Any = FOLLOW
        self.frames: list[Frame] = []  # innermost last
        self.lent: list[Any] = []  # half copies that are in the places of weights
        self.itself: threading.Thread | None = None  # once half copies were lent in it
        self.torch_half: torch.dtype | None = None  # of a region in which torch's autocast casts


class CastState:
    """The policy of the process, and each thread's own where it has one."""

    def __init__(self) -> None:
        self.process: Policy | None = None
        self.per_thread = False  # whether calls look at their own thread: see `watch`
        self.has_rules_of_user = False  # a function of torch follows a rule that the user gave
        self.tables = HandlerTables()
        self.modes = 0  # threads that are in a TorchFunctionMode; counted in `per_thread` too
        self.thread = _Thread()
        self.casts_off = CastsOff(self)
        self._region = self.under(lambda: None)
        self._own = 0
        self._lock = threading.Lock()

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

    def push(
        self, policy: Policy | None, owner: Any = None, off: SwitchedOff | None = None
    ) -> None:
        """Give this thread a policy of its own, until `pop`, which switches `off` on again."""
        thread, caller = self.thread, None
        if not isinstance(owner, _BLOCKS) and not is_dynamo_compiling():
            self.drop_ended()
            caller = calling_frame()
        found = thread.policy
        differs = policy is not (self.process if found is FOLLOW else found)
        if not differs and not isinstance(owner, _BLOCKS) and is_dynamo_compiling():
            return  # strict export warns of every write, even of one that is taken back
        thread.frames.append((owner, found, differs, off, caller))
        if differs:
            thread.policy = policy
            self.watch(+1)

    def pop(self, owner: Any = None) -> None:
        """Back to what `push` found; nothing, if the last push here was not `owner`'s.

        A `with` block ends wherever it is: an interrupted forward may have left
        its frame above, and blocks in generators end in any order.
        """
        frames = self.thread.frames
        if frames and frames[-1][0] is owner:
            _, found, differs, off, _ = frames.pop()
            if differs:
                self.thread.policy = found
                self.watch(-1)
            if off is not None:
                off.switch_on()
        elif isinstance(owner, _BLOCKS):
            self._take_out(owner)

    def _take_out(self, owner: Any) -> None:
        frames = self.thread.frames
        places = [place for place, frame in enumerate(frames) if frame[0] is owner]
        if not places:  # entered in another thread, or not at all
            return
        above = places[-1]
        _, found, differs, off, _ = frames.pop(above)
        heir, covered, heir_differs, heir_off, caller = frames[above]
        if differs:
            covered = found
            if heir_differs:
                self.watch(-1)
        frames[above] = (heir, covered, differs or heir_differs, heir_off or off, caller)

    def enter_forward(self, policy: Policy | None, owner: Any) -> None:
        """A managed forward begins: it is under `policy` until `leave_forward`.

        Of what is in force around it, the user's blocks of `disable_casts` and `precision` hold
        inside too.  Regions of torch.autocast do not: the innermost wins.  One that is enabled
        agrees that there are casts, and says the half type.
        """
        thread, off = self.thread, None
        if thread.frames:
            if not is_dynamo_compiling():
                self.drop_ended()
            if self.under_user_control():
                return
            if self._in_block_beneath_regions():
                policy = self.beneath_regions()
            elif policy is not None and policy.gate is None and policy.follows_tables:
                if is_dynamo_compiling():
                    policy = self._beside_torch(policy)
                else:
                    policy, off = _instead_of_torch(policy)
        if is_dynamo_compiling():
            self.push(policy, owner)
            return
        found = thread.policy  # as `push`, without the price of three calls
        differs = policy is not (self.process if found is FOLLOW else found)
        caller: Any = sys._getframe(1)
        while caller.f_globals.get("__name__", "").startswith(_OURS):
            caller = caller.f_back
        thread.frames.append((owner, found, differs, off, caller))
        if differs:
            thread.policy = policy
            with self._lock:
                self._own += 1
                self.per_thread = True

    def _beside_torch(self, policy: Policy) -> Policy | None:
        """For a graph of Dynamo's, which keeps the region: its casts alone if the types differ."""
        half = self.thread.torch_half
        return policy if half is None or half is policy.half_to else None

    def leave_forward(self, owner: Any) -> None:
        """The forward has ended; nothing, if it entered nothing."""
        thread = self.thread
        frames = thread.frames
        if frames[-1][0] is not owner:
            return
        if is_dynamo_compiling():
            self.pop(owner)
            return
        _, found, differs, off, _ = frames.pop()
        if differs:
            thread.policy = found
            with self._lock:
                self._own -= 1
                self.per_thread = self._own > 0
        if off is not None:
            off.switch_on()

    def under(self, choose: Callable[[], Policy | None], by_user: bool = False) -> PolicyContext:
        """A context manager and decorator: the policy is `choose()`, asked at each entry.

        What is `by_user` holds inside managed models too, and instead of torch's own autocast.
        """
        return PolicyContext(self, choose, by_user)

    def push_block(self, policy: Policy | None, block: PolicyContext) -> None:
        """A `with` block begins, until `pop`.  Where nothing casts, torch's autocast stays."""
        if not is_dynamo_compiling():
            self.drop_ended()
        is_said = block.by_user and block.has_ended is None
        casts = self.process is not None or self.per_thread
        self.push(policy, block, torch_switched_off() if is_said and casts else None)

    def enter_region(self, device: str, half: torch.dtype | None) -> None:
        """A region of torch.autocast, until `leave_region`: what Dynamo traces.

        Casts are off, unless torch's are on (`half`) and are to the same type as those here.
        """
        policy = self.current()
        if half is None or policy is None or policy.half_to is not half or policy.gate is not None:
            policy = None
        self.push(policy, self._region)

    def leave_region(self) -> None:
        """Back to what `enter_region` found."""
        self.pop(self._region)

    def drop_interrupted(self) -> None:
        """Pop what hooks pushed here for forwards that never ended.

        Ctrl-C skips forward hooks.  Called where no managed forward can be running:
        around `scale_loss`, after a step, when a session closes.
        """
        frames = self.thread.frames
        while frames and not isinstance(frames[-1][0], _BLOCKS):
            self.pop(frames[-1][0])
        self.end_interrupted()

    def end_interrupted(self) -> None:
        """Take back what was lent to forwards of this thread that never ended."""
        for lending in list(self.thread.lent):
            lending.end_if_interrupted()

    def drop_ended(self) -> None:
        """Pop what hooks pushed here for forwards whose call runs no longer: Ctrl-C skips hooks."""
        frames = self.thread.frames
        while frames and frames[-1][4] is not None and not is_running(frames[-1][4]):
            self.pop(frames[-1][0])

    def beneath_regions(self) -> Policy | None:
        """The policy in force here, but for regions of torch.autocast that were entered last."""
        policy = self.thread.policy
        for owner, found, differs, _, _ in reversed(self.thread.frames):
            if not _is_region(owner):
                break
            policy = found if differs else policy
        return self.process if policy is FOLLOW else policy

    def _in_block_beneath_regions(self) -> bool:
        """Whether regions were entered last, in a `with` block of the user's."""
        owners = [frame[0] for frame in self.thread.frames]
        if not owners or not _is_region(owners[-1]):
            return False
        beneath = next((owner for owner in reversed(owners) if not _is_region(owner)), None)
        return isinstance(beneath, _BLOCKS) and beneath.by_user

    def under_user_control(self) -> bool:
        """Whether the innermost policy here is from a `with` block of the user's."""
        frames = self.thread.frames
        if not frames or not isinstance(frames[-1][0], _BLOCKS):
            return False
        block = frames[-1][0]
        if block.has_ended is not None and block.has_ended():
            self.pop(block)
            return self.under_user_control()
        return block.by_user

    def covered_by_user(self) -> bool:
        """Whether what the innermost push here covers is from a `with` block of the user's."""
        beneath = self.thread.frames[-2:-1]
        if not beneath or not isinstance(beneath[0][0], _BLOCKS):
            return False
        block = beneath[0][0]
        return block.by_user and (block.has_ended is None or not block.has_ended())

    def covered(self) -> Policy | None:
        """The policy that the innermost push here covers; without one, that in force."""
        frames = self.thread.frames
        found = frames[-1][1] if frames and frames[-1][2] else self.thread.policy
        return self.process if found is FOLLOW else found

    def watch(self, change: int) -> None:
        """Add to (+1) or take from (-1) the reasons why calls must look at their own thread.

        A thread's own policy is one, and so is an observer that wants to see each cast.
        """
        if is_dynamo_compiling():  # it traces attributes, not locks, and runs one thread
            self._own += change
            self.per_thread = self._own > 0
            return
        with self._lock:
            self._own += change
            self.per_thread = self._own > 0


class SwitchedOff:
    """torch's own autocast, switched off in this thread because ampatch's word is the inner one."""

    __slots__ = ("_devices", "_nesting")

    def __init__(self, devices: list[str]) -> None:
        self._devices = devices
        self._nesting = nesting()
        for device in devices:
            set_enabled(device, False)

    def switch_on(self) -> None:
        """Back to what was found, unless the region has ended meanwhile: Ctrl-C skips hooks."""
        if nesting() >= self._nesting:
            for device in self._devices:
                set_enabled(device, True)


def torch_switched_off() -> SwitchedOff | None:
    """Switch torch's autocast off in this thread; None where it is not on.

    Code that Dynamo traces keeps it.
    """
    devices = [] if is_dynamo_compiling() else devices_on(device_types())
    return SwitchedOff(devices) if devices else None


def _instead_of_torch(policy: Policy) -> tuple[Policy, SwitchedOff | None]:
    """What does the casts of regions of torch.autocast that are on here, in their half type."""
    devices = [device for device in devices_on(device_types()) if policy.casts_on(device)]
    if not devices:
        return policy, None
    return policy.in_type(half_type(devices[-1])), SwitchedOff(devices)


class CastsOff:
    """`with` block without casts, for the optimizer's step: one object for all blocks.

    As `state.under(lambda: None)`, in two Python calls and no allocation.  Where nothing
    casts it does nothing, except inside another block: a closure asks whose that block is.
    """

    __slots__ = ("_state",)

    by_user = False
    has_ended = None

    def __init__(self, state: CastState) -> None:
        self._state = state

    def __enter__(self) -> None:
        state = self._state
        thread = state.thread
        if state.process is None and not state.per_thread and not thread.frames:
            return
        if is_dynamo_compiling():
            state.push(None, self)
            return
        found = thread.policy
        differs = (state.process if found is FOLLOW else found) is not None
        thread.frames.append((self, found, differs, None, None))
        if differs:
            thread.policy = None
            with state._lock:
                state._own += 1
                state.per_thread = True

    def __exit__(self, *exception: object) -> None:
        state = self._state
        frames = state.thread.frames
        if not frames:
            return
        if frames[-1][0] is not self or is_dynamo_compiling():
            state.pop(self)
            return
        _, found, differs, _, _ = frames.pop()
        if differs:
            state.thread.policy = found
            with state._lock:
                state._own -= 1
                state.per_thread = state._own > 0


def _is_region(owner: Any) -> bool:
    return isinstance(owner, PolicyContext) and owner.is_region


_BLOCKS = (PolicyContext, CastsOff)
"""Owners of frames that are `with` blocks; the others are hooks of models and modules."""
