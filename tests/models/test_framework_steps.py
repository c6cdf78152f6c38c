"""A framework's step: code around a half model that calls its parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampatch
from ampatch.integrations.framework_step import Step
from ampatch.session import facade


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.step: object = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        step, self.step = self.step, None
        return self.net(inputs) if step is None else step(inputs)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_step_that_is_sent_through_the_call_is_no_forward(level):
    model = ampatch.initialize(Model(), opt_level=level, dtype=torch.bfloat16, verbosity=0)
    seen = []

    def step(inputs: torch.Tensor) -> torch.Tensor:
        seen.extend((inputs.dtype, model.net(inputs).dtype, model(inputs).dtype))
        return inputs.double()

    model.step = step
    with facade.in_step(model, Step(is_sent_through_call=True)):
        assert model(torch.ones(2, 4)).dtype is torch.float64
    assert seen == [torch.float32] * 3
    outside = torch.bfloat16 if level == "O3" else torch.float32
    assert model.net(torch.ones(2, 4)).dtype is outside


def test_after_a_step_that_raised_calls_are_forwards_again():
    model = ampatch.initialize(Model(), opt_level="O2", dtype=torch.bfloat16, verbosity=0)

    def step(inputs: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the script's own")

    model.step = step
    with pytest.raises(RuntimeError, match="own"), facade.in_step(model, Step(True)):
        model(torch.ones(2, 4))
    assert model(torch.ones(2, 4)).dtype is torch.float32
