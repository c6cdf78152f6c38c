"""What tests of all rooms look at inside the engine: what calls and sessions have left there."""

from __future__ import annotations

from ampatch.casting.calls import FOLLOW, here
from ampatch.session.session import registry

__all__ = ["FOLLOW", "STATE", "here", "nothing_runs", "registry"]

STATE = registry.state


def nothing_runs() -> bool:
    """Whether no call, block or region is under way, in this thread and for others' functions."""
    return not here.stack and here.policy is FOLLOW and here.copies is None and not STATE.per_thread
