"""The stack of calls of each thread, and the policy that is active there.

Each thread has one stack of `Call` objects, the innermost last.  A `Call` is pushed for: a call of
a managed model, of a submodule or of a module override; a `with` block of the user's; a region of
torch.autocast; a recomputation; the backward of a custom Function; an optimizer step.  A `Call`
records its policy, its half copies, its swap, and what its exit undoes.  No other object records
which forwards run, of which models, and with which copies.

`CastState` enters and exits calls.  Each call has a Python frame of its own, whose `try` exits the
call after any exception: `models/own_frame` for modules, `CastState.run_in_call` for the others.
Only `with` blocks, of the user's and of torch.autocast, have no Python frame: `exit_block` exits
them.

Arguments are cast under the process's policy, unless the thread is inside a call that has set a
policy of its own.  Patched functions read this state at every call, so it is plain attributes.
`torch.compile` guards on what it reads while tracing.  Its guards work for plain attributes, and
for attributes that a `threading.local` subclass sets in `__init__`.  But `torch.compile` silently
freezes a class-level default of a `threading.local` into the graph, and refuses a `ContextVar`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from ..torch_private.autocast import (
    devices_with_torch_autocast,
    disable_torch_autocast,
    enable_torch_autocast,
    torch_autocast_dtype,
)
from ..torch_private.devices import device_types
from ..torch_private.probes import current_backward_pass
from .handler_containers import HandlerContainers

if TYPE_CHECKING:  # at run time imports go the other way
    from ..models.half_copy_swaps import Swap, TracedSlots
    from ..models.io_casting import InputCasts
    from ..models.own_frame import SubmoduleFrames
    from .policy import Policy
    from .weight_cache import ForwardCopies

FOLLOWS_PROCESS: Any = object()
"""For `Call.policy` and `ThreadCalls.policy`: `CastState.process_policy` is active."""
INHERIT: Any = object()
"""For a call that sets no policy (or dtype) of its own: the enclosing call's applies."""

MODULE_CALL = "module"
"""A call of a module."""
INTERNAL = "internal"
"""Code that ampatch runs under a policy, such as the recompute of a checkpoint."""
USER_BLOCK = "user"
"""A `with` block of the user's: its policy holds in managed models too."""
REGION = "region"
"""A region of torch.autocast."""
BACKWARD = "backward"
"""The backward of a Function with `custom_fwd`: `custom_bwd` restores its forward's casts."""

_TRACED_REGION = "a region of torch.autocast that Dynamo traces"


class Call:
    """One call on the stack.  It has no `__init__`, whose call would cost more than the rest."""

    owner: object = None  # the object that has entered it
    kind = MODULE_CALL
    is_dynamo_traced = False  # Dynamo traces it: `swap` and `input_casts` stay None

    # Active in this call, and in the calls inside that set no value of their own.
    policy: Policy | None = FOLLOWS_PROCESS
    forward_copies: ForwardCopies | None = None  # the half copies that calls at O1 use
    # The dtype in which a half model or an override computes; None: no fixed dtype.
    compute_dtype: torch.dtype | None = INHERIT
    # The dtype of submodule outputs in a framework's step; None: no fixed dtype.
    step_output_dtype: torch.dtype | None = INHERIT

    # What its exit undoes.
    sets_policy = False
    opened_forward_copies: ForwardCopies | None = None  # those that were opened with this call
    # The CastState on which this call has called `acquire_thread_policies`.
    acquired_state: CastState | None = None
    had_thread_policies = False  # under Dynamo: `has_thread_policies` before this call
    autocast_off: Sequence[str] = ()  # device types on which this call turned torch's autocast off
    swap: Swap | None = None  # the swap that put half copies into the slots of weights
    traced_swap: TracedSlots | None = None  # under Dynamo: the slots that got half copies
    suspended_frames: SubmoduleFrames | None = None  # the submodule frames that it has suspended
    input_casts: InputCasts | None = None  # the casts of inputs, into which the forward may write


class ThreadCalls(threading.local):
    """The calls that run in this thread, and the policy and half copies of the innermost call."""

    def __init__(self) -> None:
        self.stack: list[Call] = []
        self.policy: Policy | None = FOLLOWS_PROCESS
        self.forward_copies: ForwardCopies | None = None


thread_calls = ThreadCalls()


def innermost(owner: object) -> Call | None:
    """The innermost call of `owner` in this thread."""
    for call in reversed(thread_calls.stack):
        if call.owner is owner:
            return call
    return None


def current_compute_dtype() -> torch.dtype | None:
    """The innermost forward's compute dtype; None if it has no fixed one, or if no forward runs."""
    for call in reversed(thread_calls.stack):
        if call.compute_dtype is not INHERIT:
            return call.compute_dtype
    return None


class CastState:
    """The policy of the process, and the enter and exit of each thread's calls."""

    def __init__(self) -> None:
        self.process_policy: Policy | None = None
        # In O2 and O3 models under `init`: it casts calls of mixed dtypes and registered functions.
        self.half_model_policy: Policy | None = None
        # Whether patched functions read their thread's policy (see `acquire_thread_policies`).
        self.has_thread_policies = False
        self._users: set[Any] = set()  # calls and observers that hold `has_thread_policies`
        self._traced_users = 0  # the number of users acquired while Dynamo traces
        self.lock = threading.RLock()
        if hasattr(os, "register_at_fork"):  # a forked child lacks the thread that holds the lock
            os.register_at_fork(
                before=self.lock.acquire,
                after_in_parent=self.lock.release,
                after_in_child=self.lock.release,
            )
        self.handler_containers = HandlerContainers()
        self.threads_in_function_modes = 0  # the number of threads in a TorchFunctionMode

    # Enter and exit

    def enter(self, call: Call, owner: object) -> None:
        """Put `call` on the stack, with the policy and copies of the call around it."""
        call.owner = owner
        call.policy, call.forward_copies = thread_calls.policy, thread_calls.forward_copies
        thread_calls.stack.append(call)

    def set_policy(
        self,
        call: Call,
        policy: Policy | None,
        autocast_off: Sequence[str] = (),
        sets_policy: bool = True,
    ) -> None:
        """Put this thread under `policy` until the exit of `call`, its innermost call.

        Until then, torch's autocast is off on the device types `autocast_off`.  With
        `sets_policy=False`, `innermost_policy` skips this call.
        """
        previous = thread_calls.policy
        active = self.process_policy if previous is FOLLOWS_PROCESS else previous
        # `disable_casts()` sets its policy even if nothing is cast now: a session may open inside.
        for_new_sessions = policy is None and call.kind == USER_BLOCK
        is_change = policy is not active or for_new_sessions
        call.sets_policy = sets_policy and policy is not INHERIT
        if policy is not INHERIT and is_change and policy is not previous:
            call.acquired_state = self
            self.acquire_thread_policies(call)
            call.policy = thread_calls.policy = policy
        if autocast_off:
            call.autocast_off = autocast_off
            disable_torch_autocast(autocast_off)

    def enter_block(
        self,
        policy: Policy | None,
        kind: str = INTERNAL,
        owner: object = None,
        autocast_off: Sequence[str] = (),
    ) -> None:
        """Enter a block or region that is under `policy`, until `exit_block(owner)`."""
        call = Call()
        call.kind = kind
        call.is_dynamo_traced = is_dynamo_compiling()
        self.enter(call, owner)
        self.set_policy(call, policy, autocast_off)

    def exit_block(self, owner: object) -> None:
        """Exit the innermost block of `owner`, if it has one in this thread."""
        call = innermost(owner)
        if call is not None:
            self.exit_out_of_order(call)

    def exit_out_of_order(self, call: Call) -> None:
        """Exit a call without a swap, even if it is not the innermost.

        Blocks inside it exit with it.  If a call with a Python frame is inside it, nothing but
        `call` leaves the stack.  Generators exit blocks in any order.
        """
        stack = thread_calls.stack
        if call not in stack:
            return
        calls_inside = stack[stack.index(call) + 1 :]
        if all(inner.kind in (USER_BLOCK, REGION) for inner in calls_inside):
            self.exit(call)
            return
        if call.autocast_off:
            enable_torch_autocast(call.autocast_off)
        stack.remove(call)
        if call.acquired_state is not None:
            self.release_thread_policies(call)

    def exit(self, call: Call) -> None:
        """Exit a call, and the calls inside that are still on the stack.  May be called again."""
        stack = thread_calls.stack
        if call not in stack:
            return
        inner = None
        while inner is not call:
            inner = stack[-1]
            if inner.suspended_frames is not None:
                inner.suspended_frames.resume()
            if inner.swap is not None:
                inner.swap.swap_out()
            if inner.traced_swap is not None:
                inner.traced_swap.swap_out()
            if inner.autocast_off:
                enable_torch_autocast(inner.autocast_off)
            outer = stack[-2] if len(stack) > 1 else None
            thread_calls.policy = FOLLOWS_PROCESS if outer is None else outer.policy
            thread_calls.forward_copies = None if outer is None else outer.forward_copies
            if inner.acquired_state is not None:
                self.release_thread_policies(inner)
            del stack[-1]

    def run_in_call(
        self, enter: Callable[[Call], object], function: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        """Call `function(*args, **kwargs)` in a new `Call`, which `enter(call)` enters."""
        call = Call()
        try:
            try:
                enter(call)
                return function(*args, **kwargs)
            finally:
                self.exit(call)
        except BaseException:
            self.exit(call)  # again: KeyboardInterrupt may have interrupted the first exit
            raise

    def call_without_casts(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call `function(*args, **kwargs)` without casts.  Used for optimizer steps."""
        return self.run_in_call(self._enter_without_casts, function, *args, **kwargs)

    def _enter_without_casts(self, call: Call) -> None:
        call.kind = INTERNAL
        self.enter(call, self)
        self.set_policy(call, None)

    def call_with_outer_casts(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call `function(*args, **kwargs)` with the policy from before `call_without_casts`."""
        call = innermost(self)
        if call is None:
            return function(*args, **kwargs)
        self.exit(call)
        try:
            return function(*args, **kwargs)
        finally:
            self._enter_without_casts(call)  # `call_without_casts` exits it

    # Policies

    def current_policy(self) -> Policy | None:
        """Return the policy of a function that is called now, or None if nothing is cast."""
        if self.has_thread_policies and thread_calls.policy is not FOLLOWS_PROCESS:
            return thread_calls.policy
        return self.process_policy

    def current_policy_in_forwards(self) -> Policy | None:
        """The policy of a forward that begins now, and of its recompute in a backward pass."""
        policy = self.current_policy()
        return policy if policy is None or policy.in_forwards is None else policy.in_forwards

    def current_policy_for_device(self, device: str) -> Policy | None:
        """Return `current_policy()` if it casts calls with tensors on `device` now, else None."""
        policy = self.current_policy()
        if policy is not None and policy.in_forwards is not None:
            in_backward = not is_dynamo_compiling() and current_backward_pass() != -1
            policy = None if in_backward else policy.in_forwards
        if policy is None or device not in (policy.devices or device_types()):
            return None
        return policy

    def autocast_kernel_dtype(self, device: str, args: tuple, kwargs: dict) -> torch.dtype | None:
        """The dtype to which torch's autocast kernel should cast, or None for no cast.

        Inside a half model or an override, it is the dtype in which that module computes, which can
        be FP32.  Elsewhere, it is the policy's half dtype.
        """
        for call in reversed(thread_calls.stack):
            if call.kind != USER_BLOCK and call.compute_dtype not in (INHERIT, None):
                return call.compute_dtype
            if call.sets_policy:
                break
        policy = self.current_policy()
        if policy is None or not policy.casts_on_device(device):
            return None
        is_cast = policy.condition is None or policy.condition(args, kwargs)
        return policy.half_rows_to if is_cast else None

    def innermost_policy(self) -> tuple[Policy | None, bool]:
        """The innermost policy, ignoring regions of torch.autocast, and whether the user set it.

        A block of the user's (`precision()`, `disable_casts()`) sets the policy in managed models
        too.
        """
        for call in reversed(thread_calls.stack):
            if call.sets_policy and call.kind != REGION:
                policy = self.process_policy if call.policy is FOLLOWS_PROCESS else call.policy
                return policy, call.kind == USER_BLOCK
        return self.process_policy, False

    def policy_arguments(self, policy: Policy | None) -> tuple[Policy | None, Sequence[str], bool]:
        """The arguments of `set_policy` for a managed forward that begins within other calls.

        The user's blocks of `disable_casts` and `precision` apply in the forward too.  Regions of
        torch.autocast around it do not, but an enabled region determines the half dtype.
        """
        if thread_calls.policy is FOLLOWS_PROCESS and policy is self.process_policy:
            return INHERIT, (), False
        user_policy, by_user = self.innermost_policy()
        if by_user:
            # The user's block turned torch's autocast off.  If it is on for a device, a
            # torch.autocast region inside that block is active.
            return INHERIT if devices_with_torch_autocast() else user_policy, (), False
        devices: list[str] = []
        if policy is not None and policy.condition is None:
            devices = [
                device for device in devices_with_torch_autocast() if policy.casts_on_device(device)
            ]
        if policy is None or not devices:
            return policy, (), True
        region_dtype = torch_autocast_dtype(devices[-1])
        if not is_dynamo_compiling():
            return policy.with_half_dtype(region_dtype), devices, True
        # Dynamo's graph keeps the autocast region.  If its dtype differs from the policy's, only
        # the region casts.
        return policy if region_dtype is policy.half_rows_to else None, (), True

    def autocast_devices(self) -> Sequence[str]:
        """The device types on which torch's autocast is enabled; none while Dynamo traces.

        For `autocast_off` of `set_policy`.
        """
        return () if is_dynamo_compiling() else devices_with_torch_autocast()

    def enter_region(self, dtype: torch.dtype | None) -> None:
        """Enter a region of torch.autocast.  Called only by code that Dynamo traces.

        `dtype` is the region's dtype, or None if the region is disabled.  ampatch casts in the
        region only if the policy has the same half dtype.
        """
        policy = self.current_policy()
        if policy is not None and (
            policy.half_rows_to is not dtype or policy.condition is not None
        ):
            policy = None
        self.enter_block(policy, REGION, _TRACED_REGION)

    def exit_region(self) -> None:
        """Exit the region.  Called only by code that Dynamo traces."""
        self.exit_block(_TRACED_REGION)

    def may_cast_in_thread(self) -> bool:
        """Whether a session casts calls in this thread, or would if no block disabled casts."""
        if self.process_policy is not None:
            return True
        for call in thread_calls.stack:
            if call.policy is not None and call.policy is not FOLLOWS_PROCESS:
                return True
        return False

    def swaps(self) -> list[Swap]:
        """This thread's swaps whose half copies are in the slots, the outermost first."""
        swaps: list[Swap] = []  # a comprehension is a call before Python 3.12
        for call in thread_calls.stack:
            if call.swap is not None and call.swap.is_swapped_in:
                swaps.append(call.swap)
        return swaps

    def fp32_weight_of(self, copy: Any) -> Any:
        """Return the FP32 weight of a half copy that is in a slot, and any other tensor itself."""
        for swap in self.swaps():
            if (weight := swap.slot_copies.fp32_weight_of(copy)) is not None:  # type: ignore[union-attr]
                return weight
        return copy

    # Users of `has_thread_policies`

    def acquire_thread_policies(self, user: Any) -> None:
        """While any user holds this, patched functions read their thread's policy.

        Users are calls with a policy of their own, and observers, which see each cast.  Both
        methods may be called twice for a user: KeyboardInterrupt may be raised anywhere.
        """
        if is_dynamo_compiling():  # Dynamo cannot trace locks; a trace runs in one thread
            user.had_thread_policies, self.has_thread_policies = self.has_thread_policies, True
            self._traced_users += 1
            return
        with self.lock:
            self._users.add(user)
            self.has_thread_policies = True

    def release_thread_policies(self, user: Any) -> None:
        """Undo `acquire_thread_policies(user)`."""
        if is_dynamo_compiling():
            self.has_thread_policies = user.had_thread_policies
            self._traced_users -= 1
            return
        with self.lock:
            if getattr(user, "is_dynamo_traced", False):
                self._traced_users -= 1
            self._users.discard(user)
            self.has_thread_policies = bool(self._users) or self._traced_users > 0
