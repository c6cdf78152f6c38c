"""The states of gradients, from a block to the step: the table at the head of `gradients.py`."""

import contextlib
import math

import pytest
import torch
from engine import registry
from torch import nn

import ampatch
from ampatch.scaling.gradients import GradState


def test_each_row_of_the_table(scale_lives_on):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ampatch.initialize(model, optimizer, opt_level="O1", init_scale=1024.0, verbosity=0)
    gradients = registry.objects.managed(optimizer).gradients
    clean = (
        GradState.UNSCALED if scale_lives_on == "host" else GradState.FOUND_INF
    )  # nobody has read it
    met = []

    def block(factor: float = 1.0, **options):
        with ampatch.scale_loss(model(torch.ones(1, 2)).sum() * factor, optimizer, **options) as it:
            it.backward()
            met.append(gradients.state)

    assert gradients.state is GradState.NOT_SCALED
    block()
    assert gradients.state is clean
    optimizer.step()
    assert gradients.state is GradState.UNSCALED
    optimizer.zero_grad()
    assert gradients.state is GradState.NOT_SCALED
    block(math.inf)
    assert gradients.state is GradState.FOUND_INF
    with contextlib.suppress(ValueError), ampatch.scale_loss(model.weight.sum(), optimizer):
        raise ValueError("the block fails")
    assert gradients.state is GradState.FOUND_INF
    optimizer.step()
    assert ampatch.step_was_skipped(optimizer) and gradients.state is GradState.UNSCALED
    model.zero_grad()
    assert gradients.state is GradState.NOT_SCALED
    block(delay_unscale=True)
    assert gradients.state is GradState.SCALED
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert gradients.state is clean
    block(delay_unscale=True)
    optimizer.step()
    assert gradients.state is GradState.UNSCALED
    block(delay_unscale=True)
    optimizer.zero_grad()
    assert gradients.state is GradState.NOT_SCALED
    assert set(met) == {GradState.SCALED}


@pytest.mark.parametrize("zeroes", [False, True])
def test_what_a_script_decides_about_stays_beside_the_state(zeroes):
    """`delay_overflow_check`: the finding is held until the step, where it counts as any other."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ampatch.initialize(model, optimizer, opt_level="O1", init_scale=1024.0, verbosity=0)
    gradients = registry.objects.managed(optimizer).gradients
    loss = model(torch.ones(1, 2)).sum() * math.inf
    with ampatch.scale_loss(loss, optimizer, delay_overflow_check=True) as scaled:
        scaled.backward()
    assert gradients.state is GradState.NOT_SCALED
    if zeroes:
        optimizer.zero_grad(set_to_none=False)
        assert gradients.state is GradState.NOT_SCALED
    optimizer.step()
    assert ampatch.step_was_skipped(optimizer) is not zeroes
    assert ampatch.loss_scale() == 512.0
