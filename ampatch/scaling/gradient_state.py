"""The state machine of one optimizer's gradients, and the facts that are independent of it.

States
    COMPLETE            Gradients are in `.grad` of the tensors in `param_groups`, in FP32 and
                        unscaled; or there are none.
    SPENT               As COMPLETE, but a step has used them and they were not zeroed since.
    PENDING             They are there, scaled by `GradientState.pending` (`delay_unscale`).
    IN_BLOCK            A `scale_loss` block runs.  Earlier gradients are set aside, complete.
    IN_BLOCK_PENDING    As IN_BLOCK, but the earlier gradients are in `.grad`, at the scale of the
                        new ones, which backward adds to them.

Transitions
    event     before            after             caused by
    --------  ----------------  ----------------  -------------------------------
    ENTER     COMPLETE          IN_BLOCK          GradientFlow.make_room
              PENDING           IN_BLOCK_PENDING
    SCALE_UP  IN_BLOCK          IN_BLOCK_PENDING  GradientFlow._put_back_scaled
    LEAVE     IN_BLOCK          COMPLETE          GradientFlow.after_backward
              IN_BLOCK_PENDING  COMPLETE
    DELAY     IN_BLOCK          PENDING           GradientFlow.leave_scaled
              IN_BLOCK_PENDING  PENDING
    ABANDON   IN_BLOCK          COMPLETE          GradientFlow.abandon_backward
              IN_BLOCK_PENDING  PENDING
    UNSCALE   PENDING           COMPLETE          GradientFlow.unscale_pending
    STEP      COMPLETE          SPENT             GradientFlow.take_found_inf
    RECHECK   SPENT             COMPLETE          GradientFlow.look_again
    ZERO      SPENT             COMPLETE          GradientFlow.zeroed
              PENDING           COMPLETE          GradientFlow.zeroed_by_model
              IN_BLOCK          IN_BLOCK
              IN_BLOCK_PENDING  IN_BLOCK
    DROP      COMPLETE          COMPLETE          GradientFlow.drop_gradients
              SPENT             COMPLETE
              PENDING           COMPLETE
              IN_BLOCK          COMPLETE
              IN_BLOCK_PENDING  COMPLETE

Every other transition raises `AmpatchError`.  `TRANSITIONS` and `CAUSES` hold this table as data.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from torch import Tensor

from ..errors import AmpatchError
from .loss_scaler import Scaler
from .process_group import trains_with_others
from .scale_value import Flag, either
from .shared_parameters import sharing_among

if TYPE_CHECKING:
    from .gradient_flow import GradientFlow


class State(IntEnum):
    """The states, as the module's docstring explains them.

    Whole numbers, because an ordinary enum's hash is a Python call for each look-up.
    """

    COMPLETE = 0
    SPENT = 1
    PENDING = 2
    IN_BLOCK = 3
    IN_BLOCK_PENDING = 4


class Event(IntEnum):
    """What leads from one state to the next."""

    ENTER = 0  # a `scale_loss` block begins
    SCALE_UP = 1  # several ranks: earlier gradients get the block's scale, for one all-reduce
    LEAVE = 2  # the block ends, gradients are unscaled
    DELAY = 3  # the block ends with `delay_unscale=True`
    ABANDON = 4  # the block ends by an exception
    UNSCALE = 5  # gradients are needed that `delay_unscale` left scaled
    STEP = 6  # a step uses gradients that were checked for overflow
    RECHECK = 7  # gradients that a step has used are checked again
    ZERO = 8  # all gradients were zeroed
    DROP = 9  # unscaling was interrupted: it is unknown which gradients are still scaled


TRANSITIONS: dict[Event, dict[State, State]] = {
    Event.ENTER: {
        State.COMPLETE: State.IN_BLOCK,
        State.PENDING: State.IN_BLOCK_PENDING,
    },
    Event.SCALE_UP: {State.IN_BLOCK: State.IN_BLOCK_PENDING},
    Event.LEAVE: {
        State.IN_BLOCK: State.COMPLETE,
        State.IN_BLOCK_PENDING: State.COMPLETE,
    },
    Event.DELAY: {
        State.IN_BLOCK: State.PENDING,
        State.IN_BLOCK_PENDING: State.PENDING,
    },
    Event.ABANDON: {
        State.IN_BLOCK: State.COMPLETE,
        State.IN_BLOCK_PENDING: State.PENDING,
    },
    Event.UNSCALE: {State.PENDING: State.COMPLETE},
    Event.STEP: {State.COMPLETE: State.SPENT},
    Event.RECHECK: {State.SPENT: State.COMPLETE},
    Event.ZERO: {
        State.SPENT: State.COMPLETE,
        State.PENDING: State.COMPLETE,
        State.IN_BLOCK: State.IN_BLOCK,
        State.IN_BLOCK_PENDING: State.IN_BLOCK,
    },
    Event.DROP: dict.fromkeys(State, State.COMPLETE),
}

CAUSES: dict[Event, tuple[str, ...]] = {
    Event.ENTER: ("GradientFlow.make_room",),
    Event.SCALE_UP: ("GradientFlow._put_back_scaled",),
    Event.LEAVE: ("GradientFlow.after_backward",),
    Event.DELAY: ("GradientFlow.leave_scaled",),
    Event.ABANDON: ("GradientFlow.abandon_backward",),
    Event.UNSCALE: ("GradientFlow.unscale_pending",),
    Event.STEP: ("GradientFlow.take_found_inf",),
    Event.RECHECK: ("GradientFlow.look_again",),
    Event.ZERO: ("GradientFlow.zeroed", "GradientFlow.zeroed_by_model"),
    Event.DROP: ("GradientFlow.drop_gradients",),
}
"""The methods that cause an event; no others do."""

_REFUSALS = {
    Event.ENTER: "ampatch.scale_loss(..., <{kind}>): this optimizer is already in an enclosing "
    "scale_loss block. Leave that block first; the gradients of several blocks add up until the "
    "step.",
    Event.STEP: "{kind}.step() inside the ampatch.scale_loss block of this optimizer: its "
    "gradients are still scaled. Call step() after the block.",
}


class Unscaled(NamedTuple):
    """The scaler that unscaled gradients, and by which scale."""

    scaler: Scaler
    scale: Any


class GradientState:
    """The state of one optimizer's gradients, and the facts that hold in any state.

    Read freely; `change` alone writes `now` and `in_block`.  The other facts have their places
    elsewhere: gradients that another block left scaled are in `OtherBlocks`.
    """

    def __init__(self, optimizer: Any) -> None:
        self._kind = type(optimizer).__name__
        self.now = State.COMPLETE
        self.in_block = False  # in one of the two states of that name
        self.pending: Pending | None = None  # in the states of that name, and in no other
        self.aside: list[tuple[Tensor, Tensor]] = []  # in a block: parameters, earlier gradients
        self.overflow: Flag | None = None  # seen since the last step; None: nothing was checked
        self.known_to_all = False  # all processes have seen that overflow, on whichever it came
        self.unscaled_by: Unscaled | None = None  # by which scaler, last
        self.had_block = False  # a block was entered since the last step
        self.waiting: list[Deferred] = []  # updates of scalers that wait for the step

    def change(self, event: Event, pending: Pending | None = None) -> None:
        """Go to the next state; `pending` is what gradients join that get scaled by it.

        Raises `AmpatchError` if the event cannot happen now, and changes nothing.
        """
        after = TRANSITIONS[event].get(self.now)
        if after is None:
            self.refuse(event)
        if pending is not None:
            self.pending = pending
        elif after is not State.PENDING and after is not State.IN_BLOCK_PENDING:
            self.pending = None
        self.now = after
        self.in_block = after >= State.IN_BLOCK

    def refuse(self, event: Event) -> NoReturn:
        """Raise `AmpatchError`: the event cannot happen in this state."""
        if self.in_block and event in _REFUSALS:
            raise AmpatchError(_REFUSALS[event].format(kind=self._kind))
        raise AmpatchError(
            f"{self._kind}: internal error of ampatch: {event.name} while gradients are "
            f"{self.now.name}. Please report it, with the order of the calls."
        )

    def finish_pending(self) -> None:
        """Unscale what `delay_unscale` left scaled."""
        if self.now is State.PENDING and self.pending is not None:
            self.pending.finish()

    def note_overflow(self, found: Flag, by: Unscaled, known_to_all: bool = False) -> None:
        """Remember the overflow flag of gradients that were unscaled."""
        self.known_to_all = known_to_all and (self.overflow is None or self.known_to_all)
        self.overflow = found if self.overflow is None else either(self.overflow, found)
        self.unscaled_by = by


class Pending:
    """Gradients that `delay_unscale` left scaled, of one or several optimizers.

    All have the same value of one scaler.  They are unscaled together, so that the scaler
    counts one step however many optimizers a loss reaches.
    """

    def __init__(self, scaler: Scaler, scale: Any) -> None:
        self._scaler = scaler
        self._generation = scaler.generation
        self._flows: list[GradientFlow] = []
        self.scale = scale

    def join(self, flow: GradientFlow) -> None:
        """Count an optimizer's gradients among these."""
        if flow not in self._flows:
            self._flows.append(flow)

    def scale_up(self, grads: list[Tensor]) -> None:
        """Bring complete gradients to the scale of these, in place."""
        self._scaler.scale_grads_(grads, self.scale)

    def is_scaled_by(self, scaler: Scaler) -> bool:
        """Whether new gradients of `scaler` may be added: it has not moved since."""
        return self._scaler is scaler and self._generation == scaler.generation

    def finish(self) -> None:
        """Unscale the gradients, and let the scaler know.

        Those of an optimizer in a block of its own stay: its block unscales them.
        """
        waiting = [
            flow
            for flow in self._flows
            if flow.state.pending is self and flow.state.now is State.PENDING
        ]
        sharing = sharing_among(waiting)
        found = [flow.unscale_pending(self._scaler, self.scale, sharing) for flow in waiting]
        flags = [flag for flag in found if flag is not None]
        update_scaler(self._scaler, flags, waiting)


class Deferred:
    """A scaler's update that waits for the first step of some optimizers.

    `together`: an overflow in the gradients of one has all of them skip.
    """

    def __init__(self, scaler: Scaler, together: bool) -> None:
        self.scaler = scaler
        self._together = together
        self._flows: list[GradientFlow] = []

    def join(self, flows: Sequence[GradientFlow]) -> None:
        """Wait for the step of these optimizers too."""
        for flow in flows:
            if flow not in self._flows:
                self._flows.append(flow)
                flow.state.waiting.append(self)

    def look_again(self) -> None:
        """Look for overflow that has come since: before the first step, in all gradients."""
        looked = [(flow.state, flow.look_again()) for flow in self._flows]
        flags = [found for _, found in looked if found is not None]
        for found in flags:
            self.scaler.join_deferred(found)
        if self._together and flags:
            anywhere = functools.reduce(either, flags)
            for state, _ in looked:
                if state.unscaled_by is not None:
                    state.note_overflow(anywhere, state.unscaled_by)

    def update(self) -> None:
        """The first of them steps: the scaler reacts to the flags that it holds."""
        self.scaler.update([])
        for flow in self._flows:
            flow.state.waiting.remove(self)


def update_scaler(
    scaler: Scaler,
    flags: list[Flag],
    flows: Sequence[GradientFlow],
    *,
    at_step: bool = False,
    together: bool = False,
) -> None:
    """Have a scaler react to the overflow flags of its gradients, now or at the step.

    Where several processes train it is always at the step: in DDP's `no_sync`
    one rank alone may see an inf, at the step all have seen it.
    """
    if at_step or trains_with_others():
        scaler.defer(flags)
        known = [one for flow in flows for one in flow.state.waiting if one.scaler is scaler]
        (known[0] if known else Deferred(scaler, together)).join(flows)
    else:
        scaler.update(flags)
