"""What tests of all rooms look at inside the engine: what calls and sessions have left there."""

from __future__ import annotations

from ampatch.casting.calls import FOLLOWS_PROCESS, thread_calls
from ampatch.session.session import registry

__all__ = ["FOLLOWS_PROCESS", "STATE", "nothing_runs", "registry", "thread_calls"]

STATE = registry.state


def nothing_runs() -> bool:
    """Whether no call, block or region is under way, in this thread and for others' functions."""
    calls = thread_calls
    is_outside = (
        not calls.stack and calls.policy is FOLLOWS_PROCESS and calls.forward_copies is None
    )
    return is_outside and not STATE.has_thread_policies
