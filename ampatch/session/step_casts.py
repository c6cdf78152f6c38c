"""Switches casts off and on around an optimizer's step, for `ManagedOptimizer`."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ..casting.cast_state import CastState


class StepCasts:
    """The `Casts` of `scaling.optimizer`.  `off` is one context manager for all steps."""

    def __init__(self, state: CastState) -> None:
        self.off: AbstractContextManager[None] = state.casts_off
        self._state = state

    def on(self) -> AbstractContextManager[None]:
        """The policy in force around the step that is running, for the forward in a closure."""
        state = self._state
        return state.under(state.covered, state.covered_by_user())
