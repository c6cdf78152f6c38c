"""Which session has which optimizer and model: found at once, and right whatever happened."""

import gc
import types
from functools import partial
from unittest import mock

import pytest
import torch
from frames import frames
from small_training import managed, pass_back
from torch import nn

import ampatch
from ampatch.session.object_registry import ObjectRegistry
from ampatch.session.session import registry

SETTINGS = {"dtype": torch.bfloat16, "verbosity": 0}


def pair():
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_what_a_disabled_session_was_given_comes_back_after_a_failed_initialize(monkeypatch):
    model, optimizer = pair()
    ampatch.initialize(model, optimizer, enabled=False, **SETTINGS)
    results = registry.objects.find(optimizer)
    monkeypatch.setattr(registry, "add", lambda added: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ampatch.initialize(model, optimizer, **SETTINGS)
    assert registry.objects.find(optimizer) == results


def test_a_later_initialize_takes_it_over_also_from_a_disabled_one():
    model, optimizer = pair()
    ampatch.initialize(*pair(), **SETTINGS)
    assert registry.objects.find(optimizer) is registry.objects.session_of(model) is None
    ampatch.deactivate()
    for enabled, level in [(True, "O1"), (False, "O1"), (True, "O2"), (True, "O0")]:
        ampatch.initialize(model, optimizer, enabled=enabled, opt_level=level, **SETTINGS)
        session, managed = registry.objects.find(optimizer)
        assert session is registry.sessions[-1] and (managed is not None) is enabled
        assert (registry.objects.session_of(model) is session) is enabled
        assert len(registry.objects) == 1 + enabled and len(registry.sessions) == 1
    ampatch.deactivate()
    assert registry.objects.find(optimizer) is None and len(registry.objects) == 0


def test_part_of_a_session_leaves_it():
    (first, optimizer), (second, other) = pair(), pair()
    ampatch.initialize([first, second], [optimizer, other], **SETTINGS)
    old = registry.objects.session_of(optimizer)
    ampatch.initialize(second, other, opt_level="O2", **SETTINGS)
    assert registry.objects.session_of(optimizer) is registry.objects.session_of(first) is old
    assert registry.objects.session_of(other) is registry.objects.session_of(second) is not old
    assert [managed.model for managed in old.models] == [first]
    assert [managed.optimizer for managed in old.optimizers] == [optimizer]


def test_what_stands_for_an_optimizer_has_its_groups():
    _, optimizer = ampatch.initialize(*pair(), **SETTINGS)
    own, shared = (
        types.SimpleNamespace(optimizer=optimizer, param_groups=groups)
        for groups in (list(optimizer.param_groups), optimizer.param_groups)
    )
    assert registry.objects.unwrapped_optimizer(shared) is optimizer
    assert registry.objects.unwrapped_optimizer(own) is own


@pytest.mark.parametrize("enabled", [True, False])
def test_the_dead_are_forgotten(enabled):
    for _ in range(3):
        ampatch.initialize(*pair(), enabled=enabled, **SETTINGS)
    kept, optimizer = pair()
    ampatch.initialize(kept, optimizer, enabled=enabled, **SETTINGS)
    gc.collect()
    assert len(registry.objects) == 1 + enabled
    assert registry.objects.session_of(optimizer) is registry.sessions[-1]


class Thing:
    """Something that keeps its counterpart alive, and may be in a cycle."""


class Counterpart:
    def __init__(self, thing):
        self.thing = thing
        thing.counterpart = self


def test_an_id_used_again_finds_nothing():
    things, session = ObjectRegistry(), object()
    for _ in range(5):  # the next has the id of the last, or soon will
        thing = Thing()
        assert things.find(thing) is None
        counterpart = Counterpart(thing)
        things.put(thing, session, counterpart)
        assert things.find(thing) == (session, counterpart)
        del thing, counterpart
        gc.collect()


def test_an_old_counterpart_that_dies_late_removes_no_new_row():
    """Another thread may be looking at the old row while the new one is put."""
    things, thing, first, second = ObjectRegistry(), Thing(), object(), object()
    old, new = Counterpart(thing), Counterpart(thing)
    held = things.put(thing, first, old)
    things.put(thing, second, new)
    things.remove(id(thing), first)  # it has passed it on
    del old
    gc.collect()
    assert held() is None
    assert things.find(thing) == (second, new)
    things.remove(id(thing), second)
    assert things.find(thing) is None and len(things) == 0


@pytest.mark.parametrize("level, together", [("O1", True), ("O1", False), ("O2", False)])
def test_what_initialize_costs_does_not_grow_with_what_is_open(level, together):
    """Python functions that are entered by the last of so many calls, or by one for all of them.

    Is a session alive, does it cast, is it empty: no walk over its weights.
    """
    results = []
    for count in (1, 20, 40, 60):  # the first brings what is done once per process
        pairs = [pair() for _ in range(count)]
        for model, optimizer in [] if together else pairs[:-1]:
            ampatch.initialize(model, optimizer, opt_level=level, **SETTINGS)
        arguments = map(list, zip(*pairs, strict=True)) if together else pairs[-1]
        results.append(frames(partial(ampatch.initialize, *arguments, opt_level=level, **SETTINGS)))
        ampatch.deactivate()
    steps = results[2] - results[1], results[3] - results[2]
    assert abs(steps[1] - steps[0]) <= 10 + steps[0] / 50  # a call for each pair of 20 would be 800
    assert together or steps[0] <= 20 * 12 + 10


def test_deactivate_that_is_interrupted_leaves_what_is_open_in_force(monkeypatch):
    first, second = pair(), pair()
    for model, optimizer in (first, second):
        ampatch.initialize(model, optimizer, patch_scope="process", **SETTINGS)
    older, _newer = registry.sessions
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(older, "close", mock.Mock(side_effect=KeyboardInterrupt))
        ampatch.deactivate()
    assert registry.sessions == [older]
    assert registry.state.current_policy_in_forwards() is older.policy()
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16


# An object that stands for a managed optimizer, as frameworks hand out, serves as well as it


class Wrapper:
    """As accelerate's `AcceleratedOptimizer`."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self):
        self.optimizer.step()


@pytest.fixture
def start():
    return managed(nn.Linear(4, 4), "O2", torch.float16, init_scale=128.0)


@pytest.mark.parametrize("wrap", [Wrapper, lambda optimizer: Wrapper(Wrapper(optimizer))])
def test_every_call_takes_it(start, wrap):
    model, optimizer = start
    wrapped = wrap(optimizer)
    pass_back(model(torch.ones(1, 4)).sum() * torch.inf, wrapped)
    wrapped.step()
    assert ampatch.step_was_skipped(wrapped)
    assert ampatch.step_counts(wrapped).skipped == 1
    assert next(ampatch.master_params(wrapped)).dtype is torch.float32


def test_in_a_list_beside_its_optimizer_it_is_the_same_one(start):
    model, optimizer = start
    loss = model(torch.ones(1, 4)).sum()
    pass_back(loss, [optimizer, Wrapper(optimizer)])
    assert torch.equal(model.weight.grad, torch.ones(4, 4))


def test_what_merely_has_an_optimizer_is_none(start):
    model, optimizer = start
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ampatch.AmpatchError, match="<StepLR>"):
        ampatch.scale_loss(model(torch.ones(1, 4)).sum(), scheduler)
    cycle = types.SimpleNamespace(param_groups=[])
    cycle.optimizer = types.SimpleNamespace(param_groups=cycle.param_groups, optimizer=cycle)
    with pytest.raises(ampatch.AmpatchError, match="<SimpleNamespace>"):
        ampatch.step_was_skipped(cycle)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("how", ["initialize", "add_optimizers"])
def test_given_again_in_its_place_it_is_the_same_one(how, enabled, caplog):
    """Managed once: its step counts once, and after one `scale_loss` nothing is missed."""
    settings = {"enabled": enabled, "loss_scale": "dynamic", "verbosity": 1}
    model, optimizer = managed(nn.Linear(4, 4), "O1", **settings)
    wrapped = Wrapper(Wrapper(optimizer))
    if how == "initialize":
        results = ampatch.initialize(
            model, [optimizer, wrapped], opt_level="O2", dtype="bfloat16", **settings
        )
        assert results[0] is model and results[1][1] is wrapped
    else:
        assert ampatch.add_optimizers(wrapped) is wrapped
    pass_back(model(torch.ones(1, 4)).sum(), wrapped)
    wrapped.step()
    assert "step" not in vars(wrapped) and "without" not in caplog.text
    assert len(registry.objects) == (2 if enabled else 1)
    if enabled:
        assert ampatch.step_counts(optimizer) == ampatch.step_counts(wrapped)
        assert not ampatch.step_was_skipped(optimizer)
    ampatch.deactivate()
    assert "step" not in vars(optimizer)
