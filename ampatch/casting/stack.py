"""A thread's stack of policies: what runs under a policy of its own, the innermost last.

Calls of managed modules, `with` blocks, regions of torch.autocast, recomputations and the
backward of custom Functions all push here, and the innermost wins.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol

from torch.compiler import is_dynamo_compiling

from .policy import Policy
from .torch_autocast import switch_on

_BETWEEN = (__name__.partition(".")[0] + ".", "contextlib")

FOLLOW: Any = object()
"""Instead of a policy: the policy of the process is in force."""
KEEP: Any = object()
"""Given to `Block.enter` instead of a policy: the policy in force stays."""

CALL = "call"
"""A call of a module, from hook to hook.  Ctrl-C skips hooks: its entry may be left behind."""
BLOCK = "block"
"""Code that ampatch runs under a policy, such as the recompute of a checkpoint."""
USER = "user"
"""A `with` block of the user's: it holds in managed models too."""
REGION = "region"
"""A region of torch.autocast."""
BACKWARD = "backward"
"""The backward of a Function with `custom_fwd`: `custom_bwd` brings back its forward's casts."""


class State(Protocol):
    """What a block needs of the `CastState`."""

    process: Policy | None

    @property
    def thread(self) -> Any:
        """The stack of this thread, and the policy of its innermost entry."""

    def watch(self, change: int) -> None:
        """One reason more (+1) or fewer (-1) why calls must look at their own thread."""

    def drop_ended(self) -> None:
        """Leave calls that run no longer."""


class Entry(NamedTuple):
    """The policy from here upwards, and what to restore when the entry is left."""

    block: Block
    policy: Any  # a Policy, None (no casts), or FOLLOW
    off: Sequence[str]  # device types on which torch's autocast is off meanwhile
    caller: FrameType | None  # of a module's call, which has ended when the frame has


class Block:
    """Code that runs under a policy; in a `with` statement, without casts.

    `of`: the object by which its exit is recognized, such as a region of torch.autocast.  One
    block may be entered many times, also in several threads.  When it is left, all that was entered
    within it is left too: after Ctrl-C, which skips forward hooks and may strike any exit, entries
    may still be there.
    """

    __slots__ = ("_state", "kind", "of")

    def __init__(self, state: State, kind: str = CALL, of: Any = None) -> None:
        self._state = state
        self.kind = kind
        self.of = of

    def enter(self, policy: Policy | None = None, off: Sequence[str] = ()) -> None:
        """This thread is under `policy` until `leave`.

        `off`: device types for which torch's autocast was switched off, and is on again then.
        """
        state, new = self._state, policy
        thread, is_compiled = state.thread, is_dynamo_compiling()
        caller: Any = None
        if not is_compiled and thread.stack:
            state.drop_ended()
        found = thread.policy
        holds = policy is None and self.kind == USER  # also in sessions that open inside
        in_force = state.process if found is FOLLOW else found
        if policy is KEEP or (policy is in_force and not holds):
            new = found
        if self.kind == CALL:
            if not is_compiled:
                caller = calling_frame()
            elif new is found:
                return  # strict export warns of every write, even of one that is taken back
        if new is not FOLLOW:
            # Counted first: Ctrl-C may leave a reason too many, which costs time, but none too few.
            state.watch(+1)
        thread.stack.append(Entry(self, new, off, caller))
        if new is not FOLLOW:
            thread.policy = new

    def leave(self, *exception: object) -> None:
        """Back to what is beneath; nothing, if this is not in the stack of this thread."""
        state = self._state
        thread = state.thread
        stack = thread.stack
        place = len(stack) - 1
        while place >= 0 and stack[place].block is not self:
            place -= 1
        while len(stack) > place >= 0:
            _, policy, off, _ = stack.pop()
            if policy is not FOLLOW:
                thread.policy = stack[-1].policy if stack else FOLLOW
                state.watch(-1)
            if off:
                switch_on(off)

    __enter__: Callable[..., None] = enter
    __exit__ = leave


def calling_frame() -> FrameType | None:
    """The innermost Python frame that is neither of ampatch nor of `contextlib`.

    While a hook runs, that is the module's call.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def is_running(frame: FrameType | None) -> bool:
    """Whether a frame is on the stack of this thread."""
    now: FrameType | None = sys._getframe(1)
    while now is not None and now is not frame:
        now = now.f_back
    return now is not None
