"""`ampatch.debug`: constructed overflows, and whether the right place is named."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import ampatch


class Exponential(nn.Module):
    def forward(self, x):
        return torch.exp(x)


class GradientBomb(nn.Module):
    """Harmless forward; its backward multiplies the gradient by 1e6."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 60000 * 60000

    def forward(self, x):
        return self.Function.apply(x)


def hooks(model: nn.Module) -> int:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    on_modules = sum(len(getattr(m, table)) for m in model.modules() for table in tables)
    return on_modules + sum(len(p._backward_hooks or ()) for p in model.parameters())


def linear(weight: float) -> nn.Linear:
    layer = nn.Linear(4, 4, bias=False)
    nn.init.constant_(layer.weight, weight)
    return layer


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_linear_that_overflows_float16_is_named(level, caplog):
    model = nn.Sequential(linear(1.0), nn.Sequential(linear(300.0)))
    ampatch.initialize(model, opt_level=level, verbosity=1)
    caplog.clear()
    with ampatch.debug(model) as debugger:
        model(torch.full((1, 4), 100.0))  # 4 * 100, then 4 * 400 * 300 > 65504
        model(torch.full((1, 4), 100.0))
    report = debugger.report
    assert (report.module, report.module_class, report.phase) == ("1.0", "Linear", "forward")
    assert (report.dtype, report.value, report.step) == (torch.float16, "inf", 0)
    assert report.largest_input == 400.0 and report.input_is_finite
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1 and "1.0 (Linear)" in errors[0].getMessage()


def test_the_same_model_at_o0_has_no_report():
    model = nn.Sequential(linear(1.0), linear(300.0))
    ampatch.initialize(model, opt_level="O0", verbosity=0)
    with ampatch.debug(model) as debugger:
        model(torch.full((1, 4), 100.0)).sum().backward()
    assert debugger.report is None


def test_exp_on_a_plain_model():
    model = nn.Sequential(nn.Identity(), Exponential())
    with ampatch.debug(model) as debugger:
        model(torch.tensor([1.0, 100.0]))
    assert debugger.report.module_class == "Exponential"
    assert debugger.report.module == "1" and debugger.report.largest_input == 100.0


def test_a_nan_in_the_data_is_said_to_come_from_outside():
    model = nn.Sequential(nn.Linear(2, 2))
    with ampatch.debug(model) as debugger:
        model(torch.tensor([[1.0, float("nan")]]))
    assert debugger.report.value == "nan" and not debugger.report.input_is_finite


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_gradient_overflow_through_the_scale(level):
    model = nn.Sequential(linear(0.5), GradientBomb(), linear(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level=level, verbosity=0)
    with ampatch.debug(model) as debugger:
        loss = model(torch.ones(1, 4)).sum()
        with ampatch.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert ampatch.step_was_skipped(optimizer)
    report = debugger.report
    assert report.phase == "backward" and report.step == 0
    assert "0.weight" in report.parameters
    assert debugger.step == 1


def test_the_module_whose_backward_overflows_is_blamed():
    model = nn.Sequential(linear(0.5), GradientBomb(), linear(0.5)).half()
    with ampatch.debug(model) as debugger:
        model(torch.ones(1, 4, dtype=torch.float16)).sum().backward()
    report = debugger.report
    assert (report.module, report.phase, report.operator) == ("1", "backward", "aten.mul")
    assert report.where == "gradient of the parameter 0.weight"
    assert report.largest_input == 2.0 and report.input_is_finite
    assert report.parameters == ["0.weight"]


def test_steps_are_counted_for_plain_and_managed_optimizers():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampatch.debug(model) as debugger:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert debugger.step == 1
        ampatch.initialize(model, optimizer, opt_level="O1", verbosity=0)
        with ampatch.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert debugger.step == 2


@pytest.mark.parametrize("end", [lambda d: d.remove(), lambda d: ampatch.deactivate()])
def test_nothing_is_left_behind(end):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.BatchNorm1d(2))
    before, observers = hooks(model), len(ampatch.session.session.registry.observers)
    debugger = ampatch.debug(model)
    assert hooks(model) > before
    model(torch.randn(3, 2)).sum().backward()
    copy.deepcopy(model)(torch.randn(3, 2))
    end(debugger)
    assert hooks(model) == before and not debugger.is_active
    assert len(ampatch.session.session.registry.observers) == observers
    model(torch.full((3, 2), float("inf")))
    assert debugger.report is None


def test_reset_looks_again():
    model = nn.Sequential(Exponential())
    with ampatch.debug(model) as debugger:
        model(torch.tensor([100.0]))
        debugger.reset()
        assert debugger.report is None
        model(torch.tensor([float("nan")]))
    assert debugger.report.value == "nan"


def test_only_modules():
    with pytest.raises(TypeError, match="ampatch.debug"):
        ampatch.debug("model")
