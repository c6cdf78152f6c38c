"""`CastState.casts_off` is `state.under(lambda: None)`, and a model's entry a push."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import ampatch
from ampatch.casting.cast_state import CastState
from ampatch.casting.policy import Policy
from ampatch.casting.stack import FOLLOW, Block
from ampatch.session.registry import registry

H = torch.bfloat16
X = torch.ones(2, 2)


def seen(state: CastState) -> tuple:
    """All that anybody can ask of a state."""
    return (
        state.current(),
        state.table_policy(),
        state.covered(),
        state.under_user_control(),
        state.per_thread,
    )


def around(state: CastState) -> dict:
    """Name -> a `with` block that a step may stand in."""
    return {
        "nothing": state.under(state.current),
        "another policy": state.under(lambda: OTHER),
        "casts off": state.under(lambda: None),
        "casts off by the user": state.under(lambda: None, by_user=True),
        "a policy of the user's": state.under(lambda: OTHER, by_user=True),
    }


OTHER = Policy(half_to=torch.float16)
BLOCKS = list(around(CastState()))


def in_use(process: Policy | None) -> CastState:
    state = CastState()
    state.process = process
    return state


@pytest.mark.parametrize("outer", BLOCKS)
@pytest.mark.parametrize("casting", [True, False])
def test_casts_off_is_a_block_without_casts(casting, outer):
    policy = Policy(half_to=H) if casting else None
    found = []
    for is_short in (True, False):
        state = in_use(policy)
        with around(state)[outer]:
            before = seen(state)
            with state.casts_off if is_short else state.under(lambda: None):
                found.append(seen(state))
            assert seen(state) == before
        assert not state.thread.stack and not state.per_thread
    if casting or outer in ("another policy", "a policy of the user's"):
        assert found[0] == found[1] and found[0][0] is None
    else:  # nothing casts: nothing is pushed, and no more can be asked than that
        assert found[0][0] is found[1][0] is None and found[0][2] is found[1][2] is None


def test_casts_off_again_inside():
    state = in_use(Policy(half_to=H))
    with state.casts_off:
        with state.casts_off:
            assert state.current() is None
        assert state.current() is None and state.per_thread
    assert state.current() is state.process and not state.per_thread


def test_a_closure_s_forward_runs_under_what_the_step_covers():
    state = in_use(Policy(half_to=H))
    with state.casts_off:
        with state.under(state.covered):
            assert state.current() is state.process
        assert state.current() is None


def test_blocks_that_end_in_another_order():
    state = in_use(Policy(half_to=H))
    block = state.under(lambda: OTHER)
    with state.casts_off:
        block.__enter__()
    assert state.current() is OTHER
    block.__exit__(None, None, None)
    assert state.thread.policy is FOLLOW and not state.per_thread and not state.thread.stack


def test_other_threads_go_on_casting():
    state, found = in_use(Policy(half_to=H)), []
    with state.casts_off:
        thread = threading.Thread(target=lambda: found.append(state.current()))
        thread.start()
        thread.join()
    assert found == [state.process]


def test_what_hooks_left_is_dropped_and_a_block_is_not():
    state = in_use(Policy(half_to=H))
    with state.casts_off:
        Block(state).enter(OTHER)  # a forward that is interrupted
        state.drop_interrupted()
        assert state.current() is None
    assert not state.thread.stack


def test_a_block_entered_before_anything_casts():
    """It has nothing to switch off, and what comes meanwhile is not its to take away."""
    state = in_use(None)
    with state.casts_off:
        state.process = Policy(half_to=H)
        with state.casts_off:
            assert state.current() is None
        assert state.current() is state.process
    assert not state.thread.stack and not state.per_thread


class Calls(nn.Module):
    def __init__(self, inside=lambda: None):
        super().__init__()
        self.linear, self.inside = nn.Linear(2, 2), inside

    def forward(self, x):
        self.inside()
        return self.linear(x)


def initialized(model, level):
    return ampatch.initialize(model, opt_level=level, dtype=H, verbosity=0)


def test_a_model_within_a_model_within_itself():
    """A forward that changes nothing pushes nothing; what runs inside must not take that away."""
    depth = []

    def inner():
        if len(depth) < 2:
            depth.append(registry.state.current())
            other(X)
            depth.append(registry.state.current())

    def again():
        if len(depth) < 2:
            model(X)

    model, other = Calls(inner), Calls(again)
    initialized(other, "O0")
    initialized(model, "O1")
    assert model(X).dtype is H
    assert depth[0] is depth[1] is registry.table.managed(model).policy
    assert not registry.state.thread.stack and not registry.state.per_thread


@pytest.mark.parametrize("level, dtype", [("O0", torch.float32), ("O1", H)])
def test_a_recursive_forward_keeps_its_own_policy_to_the_end(level, dtype):
    found = []

    def again():
        if len(found) < 1:
            found.append(None)
            model(X)
            found.append(torch.mm(X, X).dtype)

    model = initialized(Calls(again), level)
    initialized(nn.Linear(2, 2), "O1" if level == "O0" else "O0")
    model(X)
    assert found[1] is dtype
