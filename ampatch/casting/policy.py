"""Which casting is in force, and for whom.

A `Policy` says which dtypes the rules stand for.  A `CastState` says which
policy a call in this thread is under: usually the process's, unless this
thread is inside a managed model, `disable_casts()` or `precision()`.

Patched functions read the state on every call, so it is plain attributes.
`torch.compile` guards on what it reads while tracing: on plain attributes and
on attributes that a `threading.local` subclass sets in `__init__` it guards
rightly (a class-level default of a `threading.local`, and a `ContextVar`, it
does not: the first is silently frozen into the graph, the second refused).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from .under import Under
from .weight_cache import WeightCache

FOLLOW = object()
"""This thread has nothing of its own: the process's policy counts."""


@dataclasses.dataclass(eq=False)
class Policy:
    """What the rules mean while this policy is in force.

    `half_to` and `float_to` are the dtypes that HALF and FLOAT rows cast to;
    `precision("float")` sets both to FP32.  `devices` are the device types whose
    tensors are cast, None for all.  `gate`, if any, sees a call's arguments and
    says whether the rules apply to it at all.  `special` maps an original
    function to the dtype the user's overrides ask for.  Where `follows_tables` is
    False these are the only functions that cast: the rows count for nothing.
    `half_type` stays the half type where a forced policy has FP32 for `half_to`.
    """

    half_to: torch.dtype
    float_to: torch.dtype = torch.float32
    devices: set[str] | None = None
    gate: Callable[[tuple, dict], bool] | None = None
    special: dict[Any, torch.dtype] = dataclasses.field(default_factory=dict)
    follows_tables: bool = True
    allow_banned: bool = True
    apex_flavour: bool = False
    half_type: torch.dtype | None = None
    cache: WeightCache = dataclasses.field(default_factory=WeightCache)

    def __post_init__(self) -> None:
        if self.half_type is None:
            self.half_type = self.half_to

    def forced(self, dtype: torch.dtype) -> Policy:
        """This policy with every rule casting to `dtype`; its own (closed) cache."""
        return dataclasses.replace(
            self, half_to=dtype, float_to=dtype, gate=None, special={}, cache=WeightCache()
        )


class _ThreadPolicy(threading.local):
    def __init__(self) -> None:
        self.policy: Any = FOLLOW
        self.frames: list[Frame] = []


class CastState:
    """The policy of the process, and each thread's own where it has one."""

    def __init__(self) -> None:
        self.process: Policy | None = None
        self.overridden = False  # some thread has a policy of its own
        self.thread = _ThreadPolicy()
        self._own = 0
        self._lock = threading.Lock()

    def current(self) -> Policy | None:
        """The policy of a call made here and now; None: no casting."""
        if self.overridden and self.thread.policy is not FOLLOW:
            return self.thread.policy
        return self.process

    def table_policy(self) -> Policy | None:
        """`current()` if it follows the tables; None: rows cast nothing here and now."""
        policy = self.current()
        return policy if policy is not None and policy.follows_tables else None

    def push(self, policy: Policy | None, owner: Any = None) -> None:
        """Give this thread a policy of its own, until `pop`."""
        thread = self.thread
        differs = policy is not self.current()
        if not differs and not isinstance(owner, Under) and is_dynamo_compiling():
            return  # strict export warns of every write, even of one that is taken back
        thread.frames.append(Frame(owner, thread.policy, differs))
        if differs:
            thread.policy = policy
            self._count(+1)

    def pop(self, owner: Any = None) -> None:
        """Back to what `push` found; nothing, if the last push here was not `owner`'s.

        A `with` block ends wherever it stands: an interrupted forward may have left
        its frame above, and blocks in generators end in any order.
        """
        frames = self.thread.frames
        if frames and frames[-1].owner is owner:
            frame = frames.pop()
            if frame.differs:
                self.thread.policy = frame.found
                self._count(-1)
        elif isinstance(owner, Under):
            self._take_out(owner)

    def _take_out(self, owner: Under) -> None:
        frames = self.thread.frames
        places = [place for place, frame in enumerate(frames) if frame.owner is owner]
        if not places:  # entered in another thread, or not at all
            return
        frame, above = frames.pop(places[-1]), places[-1]
        if frame.differs:
            heir = frames[above]
            frames[above] = Frame(heir.owner, frame.found, True)
            if heir.differs:
                self._count(-1)

    def drop_interrupted(self) -> None:
        """Pop what hooks pushed here for forwards that never ended.

        Ctrl-C skips forward hooks.  Called where no managed forward can be running:
        around `scale_loss`, after a step, when a session closes.
        """
        frames = self.thread.frames
        while frames and not isinstance(frames[-1].owner, Under):
            self.pop(frames[-1].owner)

    def under_user_control(self) -> bool:
        """Whether the innermost policy here is from a `with` block of the user's."""
        frames = self.thread.frames
        return bool(frames) and isinstance(frames[-1].owner, Under) and frames[-1].owner.by_user

    def covered(self) -> Policy | None:
        """The policy that the innermost push here covers."""
        frame = self.thread.frames[-1]
        found = frame.found if frame.differs else self.thread.policy
        return self.process if found is FOLLOW else found

    def _count(self, change: int) -> None:
        if is_dynamo_compiling():  # it traces attributes, not locks, and runs one thread
            self._own += change
            self.overridden = self._own > 0
            return
        with self._lock:
            self._own += change
            self.overridden = self._own > 0

    def under(self, choose: Callable[[], Policy | None], by_user: bool = False) -> Under:
        """A context manager and decorator: the policy is `choose()`, asked at each entry.

        What is `by_user` holds inside managed models too.
        """
        return Under(self, choose, by_user)


@dataclasses.dataclass(frozen=True)
class Frame:
    """Who pushed a policy, what it covered, and whether it changed anything."""

    owner: Any
    found: Any
    differs: bool
