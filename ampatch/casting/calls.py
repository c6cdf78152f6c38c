"""What runs in a thread: one `Call` each, on one stack, the innermost last.

Calls of managed models, of their parts and of module overrides push here, and so do `with` blocks,
regions of torch.autocast, recomputations and the backward of custom Functions.  A call says which
policy is in force, which half copies serve, what is lent, and what its end gives back.  Nothing
else records that a forward runs, whose it is, or with what.

Ctrl-C skips hooks and may strike any exit, so a call may stay on the stack.  `CastState` ends it
when the next call or step begins, if the frame that made it runs no longer.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, Protocol

from torch import nn

_BETWEEN = (__name__.partition(".")[0] + ".", "contextlib")

FOLLOW: Any = object()
"""Instead of a policy: the policy of the process is in force."""
KEEP: Any = object()
"""Instead of a policy or a dtype: what is in force stays."""

CALL = "call"
"""A call of a module, from hook to hook."""
BLOCK = "block"
"""Code that ampatch runs under a policy, such as the recompute of a checkpoint."""
USER = "user"
"""A `with` block of the user's: it holds in managed models too."""
REGION = "region"
"""A region of torch.autocast."""
BACKWARD = "backward"
"""The backward of a Function with `custom_fwd`: `custom_bwd` brings back its forward's casts."""


class Ends(Protocol):
    """What a call has put somewhere."""

    def end(self) -> None:
        """Take it back.  May be called again."""


class Call:
    """One thing that runs.  It has no `__init__`, whose call would cost more than the rest."""

    # Who began it, and which module is called: its end is recognized by both.
    begun_by: Any = None
    module: nn.Module | None = None
    kind = CALL
    is_recursive = False  # the module calls itself: a call of it is beneath
    is_passive = False  # a call around it casts and lends
    is_traced = False  # by Dynamo: no frame, no inputs, no copies
    caller: FrameType | None = None  # None: code that may be suspended, or is traced

    # In force from here upwards.
    policy: Any = FOLLOW
    copies: Any = None  # the `ForwardCopies` that serve at O1
    computes_in: Any = KEEP  # the dtype of half models and of overrides; None: any
    results_in: Any = KEEP  # the dtype of what parts return in a framework's step; None: any

    # What began with it, for its end.
    sets_policy = False
    opened_copies: Any = None  # the `ForwardCopies`
    counted_by: Any = None  # the `CastState`, where `policy` is a reason to look at this thread
    autocast_off: Sequence[str] = ()  # device types on which torch's is off meanwhile
    lending: Any = None  # half copies in the places of weights
    traced_places: Ends | None = None  # the same where Dynamo traces
    removed_hooks: Ends | None = None  # those of parts
    input_casts: Any = None  # for what the forward writes into its inputs


class Here(threading.local):
    """The calls that run in this thread; `policy` and `copies` are those of the innermost."""

    def __init__(self) -> None:
        self.stack: list[Call] = []
        self.policy: Any = FOLLOW
        self.copies: Any = None
        self.leftovers = _Leftovers(self.stack)


class _Leftovers:
    """Ends as its thread does, and takes back what calls have lent that never ended."""

    def __init__(self, stack: list[Call]) -> None:
        self._stack = stack

    def __del__(self) -> None:
        while self._stack:
            call = self._stack.pop()
            for one in (call.removed_hooks, call.lending):
                if one is not None:
                    one.end()
            if call.counted_by is not None:
                call.counted_by.watch(-1)


here = Here()


def calling_frame() -> FrameType | None:
    """The innermost Python frame that is neither of ampatch nor of `contextlib`.

    While a hook runs, that is the module's call.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def is_running(frame: FrameType | None, now: FrameType | None = None) -> bool:
    """Whether a frame is on the stack of this thread, or on the stack that has `now` on its top."""
    now = now or sys._getframe(1)
    while now is not None and now is not frame:
        now = now.f_back
    return now is not None


def innermost(
    begun_by: object, module: nn.Module | None = None, is_traced: bool = False
) -> Call | None:
    """The innermost call that `begun_by` has begun; with `module`: for this module, traced or not.

    Traced code must not look at modules of other calls: Dynamo would find the same module twice.
    """
    for call in reversed(here.stack):
        if call.begun_by is begun_by and (
            module is None or (call.is_traced is is_traced and call.module is module)
        ):
            return call
    return None


def computes_in() -> Any:
    """The dtype in which the forward around this line computes; None: any, or there is none."""
    for call in reversed(here.stack):
        if call.computes_in is not KEEP:
            return call.computes_in
    return None
