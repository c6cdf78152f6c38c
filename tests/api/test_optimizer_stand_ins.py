"""An object that stands for a managed optimizer, as frameworks hand out, serves as well as it."""

import types

import pytest
import torch
from engine import registry
from small_training import managed, pass_back
from torch import nn

import ampatch


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
