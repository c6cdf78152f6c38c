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

from .contexts import Under
from .handler_tables import HandlerTables
from .weight_cache import WeightCache

FOLLOW = object()
"""This thread has nothing of its own: the process's policy counts."""

Frame = tuple[Any, Any, bool]
"""Who pushed a policy, what it covered, and whether it changed anything.

A plain tuple: forwards and steps make several, and a class's constructor is a call.
"""


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

    `is_plain` says in one word that the tables alone decide: no gate, no overrides.
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
    is_plain: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        if self.half_type is None:
            self.half_type = self.half_to
        self.is_plain = self.follows_tables and self.gate is None and not self.special

    def override(self, original: Any, dtype: torch.dtype) -> None:
        """Have one function cast to `dtype` whatever the tables say."""
        self.special[original] = dtype
        self.is_plain = False

    def forced(self, dtype: torch.dtype) -> Policy:
        """This policy with every rule casting to `dtype`; its own (closed) cache."""
        return dataclasses.replace(
            self, half_to=dtype, float_to=dtype, gate=None, special={}, cache=WeightCache()
        )


class _ThreadPolicy(threading.local):
    def __init__(self) -> None:
        self.policy: Any = FOLLOW
        self.frames: list[Frame] = []  # innermost last


class CastState:
    """The policy of the process, and each thread's own where it has one."""

    def __init__(self) -> None:
        self.process: Policy | None = None
        self.overridden = False  # a thread has a policy of its own, or somebody watches
        self.tables = HandlerTables()
        self.modes = 0  # threads that are in a TorchFunctionMode; counted in `overridden` too
        self.thread = _ThreadPolicy()
        self._casts_off = self.under(lambda: None)
        self.casts_off = CastsOff(self)
        self._region = self.under(lambda: None, by_user=True)
        self._own = 0
        self._lock = threading.Lock()

    def current(self) -> Policy | None:
        """The policy of a call made here and now; None: no casting."""
        if self.overridden and self.thread.policy is not FOLLOW:
            return self.thread.policy
        return self.process

    def table_policy(self) -> Policy | None:
        """`current()` if it follows the tables; None: rows cast nothing here and now."""
        policy = self.process
        if self.overridden:  # as `current()`, without the price of a call
            own = self.thread.policy
            if own is not FOLLOW:
                policy = own
        return policy if policy is not None and policy.follows_tables else None

    def push(self, policy: Policy | None, owner: Any = None) -> None:
        """Give this thread a policy of its own, until `pop`."""
        thread = self.thread
        found = thread.policy
        differs = policy is not (self.process if found is FOLLOW else found)
        if not differs and not isinstance(owner, Under) and is_dynamo_compiling():
            return  # strict export warns of every write, even of one that is taken back
        thread.frames.append((owner, found, differs))
        if differs:
            thread.policy = policy
            self._count(+1)

    def pop(self, owner: Any = None) -> None:
        """Back to what `push` found; nothing, if the last push here was not `owner`'s.

        A `with` block ends wherever it stands: an interrupted forward may have left
        its frame above, and blocks in generators end in any order.
        """
        thread = self.thread
        frames = thread.frames
        if frames and frames[-1][0] is owner:
            _, found, differs = frames.pop()
            if differs:
                thread.policy = found
                self._count(-1)
        elif isinstance(owner, Under):
            self._take_out(owner)

    def suspend(self) -> bool:
        """Casts off in this thread until `resume` gets what this returns.

        What `with state.under(lambda: None)` does, in fewer calls, for the optimizer's step.
        Where nothing casts there is nothing to do, and False to return.
        """
        if self.process is None and not self.overridden:
            return False
        if is_dynamo_compiling():
            self.push(None, self._casts_off)
            return True
        thread = self.thread
        found = thread.policy
        differs = (self.process if found is FOLLOW else found) is not None
        thread.frames.append((self._casts_off, found, differs))
        if differs:
            thread.policy = None
            with self._lock:
                self._own += 1
                self.overridden = True
        return True

    def resume(self, suspended: bool) -> None:
        """Back to what `suspend` found, in the same thread."""
        if not suspended:
            return
        thread = self.thread
        frames = thread.frames
        if is_dynamo_compiling() or not frames or frames[-1][0] is not self._casts_off:
            self.pop(self._casts_off)
            return
        _, found, differs = frames.pop()
        if differs:
            thread.policy = found
            with self._lock:
                self._own -= 1
                self.overridden = self._own > 0

    def enter_region(self) -> None:
        """Casts off, in managed models too, until `leave_region`: what Dynamo traces."""
        self.push(None, self._region)

    def leave_region(self) -> None:
        """Back to what `enter_region` found."""
        self.pop(self._region)

    def _take_out(self, owner: Under) -> None:
        frames = self.thread.frames
        places = [place for place, frame in enumerate(frames) if frame[0] is owner]
        if not places:  # entered in another thread, or not at all
            return
        above = places[-1]
        _, found, differs = frames.pop(above)
        if differs:
            heir, _, heir_differs = frames[above]
            frames[above] = (heir, found, True)
            if heir_differs:
                self._count(-1)

    def drop_interrupted(self) -> None:
        """Pop what hooks pushed here for forwards that never ended.

        Ctrl-C skips forward hooks.  Called where no managed forward can be running:
        around `scale_loss`, after a step, when a session closes.
        """
        frames = self.thread.frames
        while frames and not isinstance(frames[-1][0], Under):
            self.pop(frames[-1][0])

    def under_user_control(self) -> bool:
        """Whether the innermost policy here is from a `with` block of the user's."""
        frames = self.thread.frames
        return bool(frames) and isinstance(frames[-1][0], Under) and frames[-1][0].by_user

    def covered_by_user(self) -> bool:
        """Whether what the innermost push here covers is from a `with` block of the user's."""
        beneath = self.thread.frames[-2:-1]
        return bool(beneath) and isinstance(beneath[0][0], Under) and beneath[0][0].by_user

    def covered(self) -> Policy | None:
        """The policy that the innermost push here covers; without one, that in force."""
        frames = self.thread.frames
        found = frames[-1][1] if frames and frames[-1][2] else self.thread.policy
        return self.process if found is FOLLOW else found

    def watch(self, change: int) -> None:
        """Somebody wants to see each cast (+1), or no longer does (-1): no short cuts meanwhile."""
        self._count(change)

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


class CastsOff:
    """`with` block without casts, for the optimizer's step: one object for all blocks."""

    def __init__(self, state: CastState) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._state.suspend()

    def __exit__(self, *exception: object) -> None:
        self._state.resume(True)
