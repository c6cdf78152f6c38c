"""The state machine of gradients: its docstring is its data; other transitions are impossible."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest
import torch
from small_training import backward, data, start

import ampatch
from ampatch.scaling import gradient_state
from ampatch.scaling.gradient_state import (
    CAUSES,
    TRANSITIONS,
    Event,
    GradientState,
    Pending,
    State,
)
from ampatch.scaling.loss_scaler import StaticScaler
from ampatch.session.registry import registry

SCALING = Path(gradient_state.__file__).parent
SCALED = (State.PENDING, State.IN_BLOCK_PENDING)
LEGAL = [(event, before) for event, moves in TRANSITIONS.items() for before in moves]
ILLEGAL = [pair for pair in itertools.product(Event, State) if pair not in LEGAL]


def table() -> str:
    """The transitions as the module's docstring shows them."""
    lines = [
        "    event     before            after             caused by",
        "    --------  ----------------  ----------------  -------------------------------",
    ]
    for event in Event:
        moves = TRANSITIONS[event].items()
        rows = itertools.zip_longest([event.name], moves, CAUSES[event], fillvalue="")
        for name, (before, after), cause in rows:
            lines.append(
                f"    {name:10}{before.name:18}{after.name:18}{cause}".rstrip(),
            )
    return "\n".join(lines)


def in_state(now: State) -> GradientState:
    state = GradientState(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    state.now, state.in_block = now, now >= State.IN_BLOCK
    state.pending = Pending(StaticScaler(2.0), 2.0) if now in SCALED else None
    return state


def test_the_docstring_shows_the_table():
    assert table() in gradient_state.__doc__


def test_the_docstring_explains_each_state():
    explained = gradient_state.__doc__.partition("Transitions")[0]
    assert [line.split()[0] for line in explained.splitlines() if line[4:5].isupper()] == [
        state.name for state in State
    ]


def test_each_event_is_caused_where_the_table_says():
    found: dict[str, set[str]] = {event.name: set() for event in Event}
    for path in SCALING.rglob("*.py"):
        for owner in ast.walk(ast.parse(path.read_text())):
            for method in getattr(owner, "body", []) if isinstance(owner, ast.ClassDef) else ():
                for call in ast.walk(method):
                    if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".change"):
                        event = ast.unparse(call.args[0]).removeprefix("Event.")
                        if event in found:
                            found[event].add(f"{owner.name}.{method.name}")
    assert found == {event.name: set(causes) for event, causes in CAUSES.items()}


@pytest.mark.parametrize("event, before", LEGAL)
def test_a_legal_transition(event, before):
    state = in_state(before)
    after = TRANSITIONS[event][before]
    joined = Pending(StaticScaler(2.0), 2.0) if after in SCALED else None
    state.change(event, joined)
    assert state.now is after and state.in_block == after.name.startswith("IN_BLOCK")
    assert state.pending is joined


@pytest.mark.parametrize("event, before", ILLEGAL)
def test_an_illegal_transition_raises_and_changes_nothing(event, before):
    state = in_state(before)
    seen = dict(vars(state))
    expected = {
        (Event.ENTER, True): "already in an enclosing scale_loss block",
        (Event.STEP, True): "inside the ampatch.scale_loss block",
    }.get((event, state.in_block), f"{event.name} while gradients are {before.name}")
    with pytest.raises(ampatch.AmpatchError, match=expected) as raised:
        state.change(event)
    assert "SGD" in str(raised.value) and vars(state) == seen


def test_what_is_pending_stays_when_a_block_begins_and_is_abandoned():
    state = in_state(State.PENDING)
    pending = state.pending
    state.change(Event.ENTER)
    assert state.now is State.IN_BLOCK_PENDING and state.pending is pending
    state.change(Event.ABANDON)
    assert state.now is State.PENDING and state.pending is pending


def test_a_training_step_from_state_to_state(opt_level):
    """O0 to O3, with a dynamic loss scale."""
    model, optimizer = start(opt_level, loss_scale="dynamic")
    state = registry.table.managed(optimizer).gradients.state
    seen = [state.now]
    with ampatch.scale_loss(model(data()[0]).float().sum(), optimizer) as scaled:
        seen.append(state.now)
        scaled.backward()
    seen.append(state.now)
    backward(model, optimizer, data(), delay_unscale=True)
    seen.append(state.now)
    with ampatch.scale_loss(model(data()[0]).float().sum(), optimizer) as scaled:
        seen.append(state.now)
        scaled.backward()
    optimizer.step()
    seen.append(state.now)
    optimizer.zero_grad()
    assert [one.name for one in (*seen, state.now)] == [
        *("COMPLETE", "IN_BLOCK", "COMPLETE", "PENDING", "IN_BLOCK_PENDING"),
        *("SPENT", "COMPLETE"),
    ]


def test_gradients_that_a_block_is_unscaling_are_left_to_it_when_another_optimizer_steps():
    """They waited together; the one that is in a block of its own is unscaled by that block."""
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    pair = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
    ampatch.initialize(models, pair, opt_level="O0", loss_scale=8.0, verbosity=0)
    x = torch.ones(1, 2)
    loss = models[0](x).sum() + models[1](x).sum()
    with ampatch.scale_loss(loss, pair, delay_unscale=True) as scaled:
        scaled.backward()
    with ampatch.scale_loss(models[0](x).sum(), pair[0]) as scaled:
        pair[1].step()
        assert torch.equal(models[1].weight.grad, x)
        scaled.backward()
    assert torch.equal(models[0].weight.grad, 2 * x)
