"""`initialize` again: idempotent, at another level, failing."""

from unittest import mock

import pytest
import torch
from session_pairs import Slotted, backward, build, hook_count, one_step, pair, state_of, values
from small_training import pass_back, same
from torch import nn

import ampatch
from ampatch.session.session import registry

LEVELS = ("O0", "O1", "O2", "O3")


def depth(function):
    count = 0
    while hasattr(function, "__wrapped__"):
        function, count = function.__wrapped__, count + 1
    return count


@pytest.mark.parametrize("first", LEVELS)
def test_every_level_after_every_level(first, opt_level):
    """Weights are FP32 but at O3, which rounds them; nothing finer is left when it goes."""
    model, optimizer = pair()
    ampatch.initialize(model, optimizer, opt_level=first, verbosity=0)
    for step in range(3):
        one_step(model, optimizer, step)
    weights, state, params = state_of(model), optimizer.state, list(model.parameters())
    momentum = [state[param]["momentum_buffer"].clone() for param in params]
    ampatch.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    assert len(registry.sessions) == 1 and optimizer.state is state
    kept = torch.float16 if opt_level == "O3" else torch.float32
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name].to(value.dtype))
    masters = ampatch.master_params(optimizer)
    for master, param, before in zip(masters, params, momentum, strict=True):
        results = state[master]["momentum_buffer"]
        assert master is param and results.dtype is master.dtype is kept
        assert torch.equal(results, before.to(kept))
    before = values(model, optimizer)
    one_step(model, optimizer, 3)
    assert not same(before, values(model, optimizer))


@pytest.mark.parametrize("scheduled", [None, "before", "after"])
def test_many_times_over_nothing_nests(opt_level, scheduled):
    """Schedulers wrap our step, and stay when it goes: the next step of ours must not wrap them."""
    model, optimizer = pair()
    depths, hooks = [], []
    for number in range(30):
        if (scheduled, number) in {("before", 0), ("after", 1)}:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        ampatch.initialize(model, optimizer, opt_level=opt_level, dtype=torch.bfloat16, verbosity=0)
        depths.append(depth(optimizer.step))
        hooks.append(hook_count(model))
    assert len(set(depths[1:])) == 1 and len(set(hooks)) == 1
    before = values(model, optimizer)
    one_step(model, optimizer, 0)
    assert not same(before, values(model, optimizer))
    if scheduled:
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.05
    backward(model, optimizer, 1)
    ampatch.deactivate()
    assert depth(optimizer.step) == (depths[-1] if scheduled == "after" else depths[-1] - 1)
    model[0].weight.grad.fill_(torch.nan)
    optimizer.step()  # a plain one
    assert model[0].weight.isnan().all()


def test_enabled_false_gives_the_objects_back(opt_level):
    model, optimizer = pair()
    for number, settings in enumerate(({"opt_level": opt_level}, {"enabled": False}) * 2):
        weights = [value.clone() for value in model.state_dict().values()]
        ampatch.initialize(model, optimizer, **settings, verbosity=0)
        assert len(registry.sessions) == 1
        if "enabled" in settings:
            assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
            assert all(map(torch.equal, model.state_dict().values(), weights))
            assert "step" not in vars(optimizer) and hook_count(model) == hook_count(build())
        one_step(model, optimizer, number)


class Unfit(nn.Linear):
    """Is refused late, when another model and its optimizer have been taken over."""

    @property
    def forward(self):
        raise TypeError("no forward")


def fail_to_initialize(model, optimizer, other, late=False, level="O1"):
    kind = torch.optim.SGD if late else Slotted
    optimizers = [optimizer, kind(other.parameters())]
    settings = {"opt_level": level, "dtype": torch.bfloat16, "verbosity": 0}
    with pytest.raises(TypeError):
        ampatch.initialize([model, other], optimizers, **settings)


@pytest.mark.parametrize(
    "when, scheduled, second",  # late: the second level has changed weights and replaced steps
    [("early", False, "O2"), ("late", True, "O2"), ("late", False, "O0"), ("late", False, "O3")],
)
def test_a_failing_second_time_leaves_the_first_in_force(opt_level, when, scheduled, second):
    """Not plain FP32: managed as before, between a backward pass and its step."""
    runs, late = [], when == "late"
    for fails in (False, True):
        model, optimizer = pair()
        settings = {"init_scale": 2.0**10, "num_losses": 2, "verbosity": 0}
        ampatch.initialize(model, optimizer, opt_level=opt_level, **settings)
        if scheduled:
            torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in range(2):
            one_step(model, optimizer, step)
        ampatch.set_loss_scale(2.0**9, loss_id=1)
        backward(model, optimizer, 2, loss_id=1)
        if fails:
            before = values(model, optimizer), hook_count(model), depth(optimizer.step)
            other = Unfit(4, 8) if late else build(1)
            fail_to_initialize(model, optimizer, other, late, second)
            after = values(model, optimizer), hook_count(model), depth(optimizer.step)
            assert same(before[0], after[0]) and before[1:] == after[1:]
            assert hook_count(other) == hook_count(Unfit(4, 8) if late else build())
            assert {parameter.dtype for parameter in other.parameters()} == {torch.float32}
            assert len(registry.sessions) == 1
        optimizer.step()
        for step in range(3, 5):
            one_step(model, optimizer, step)
        runs.append((values(model, optimizer), ampatch.state_dict()))
        ampatch.deactivate()
    assert same(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]


def test_an_overflow_seen_before_a_failing_second_time_still_skips():
    model, optimizer = pair()
    ampatch.initialize(model, optimizer, opt_level="O2", verbosity=0)
    loss = model(torch.ones(3, 4)).sum() * torch.inf
    pass_back(loss, optimizer)
    fail_to_initialize(model, optimizer, build(1))
    optimizer.step()
    assert ampatch.step_was_skipped(optimizer)


def again(level):
    settings = {"opt_level": level, "dtype": torch.bfloat16, "verbosity": 0}
    return lambda model, optimizer: ampatch.initialize(model, optimizer, **settings)


AGAIN = {
    **{level: again(level) for level in ("O1", "O2", "O3")},
    "add_optimizers": lambda model, optimizer: ampatch.add_optimizers(optimizer),
    "add_models": lambda model, optimizer: ampatch.add_models(nn.Sequential(model[0])),
}


@pytest.mark.parametrize("how", AGAIN)
def test_after_ctrl_c_in_a_forward_at_o2(how):
    """Half copies of weights are in their places; what comes next finds the weights."""
    model, optimizer = pair()
    params = list(model.parameters())
    again("O2")(model, None if how == "add_optimizers" else optimizer)
    hook = model[2].register_forward_pre_hook(mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(3, 4))
    hook.remove()
    AGAIN[how](model, optimizer)
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    before = model[0].weight.detach().clone()
    one_step(model, optimizer, 0)
    assert not torch.equal(before, model[0].weight)
