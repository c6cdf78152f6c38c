"""`ampatch.debug`: constructed overflows, and whether the right place is named."""

import logging

import pytest
import torch
from small_training import Made, managed, pass_back
from torch import nn

import ampatch
from ampatch.diagnose.histogram import Histogram


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.function(gradient), None


def backward_by(function) -> nn.Module:
    """Harmless forward; its backward is `function`."""
    return Made(lambda module, x: Passed.apply(x, function))


def linear(weight: float) -> nn.Linear:
    layer = nn.Linear(4, 4, bias=False)
    nn.init.constant_(layer.weight, weight)
    return layer


def test_a_plain_model_and_what_comes_from_outside(caplog):
    model = nn.Sequential(nn.Identity(), nn.Sequential(Made(lambda module, x: torch.exp(x))))
    with ampatch.debug(model) as debugger:
        for _ in range(2):
            model(torch.tensor([1.0, 100.0]))
        report = debugger.report
        assert (report.module, report.module_class) == ("1.0", "Made")
        assert report.largest_input == 100.0
        [error] = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert "1.0 (Made)" in error.getMessage()
        debugger.reset()
        assert debugger.report is None
        model(torch.tensor([1.0, float("nan")]))
    assert debugger.report.value == "nan" and not debugger.report.input_is_finite


def test_wrong_arguments():
    with pytest.raises(ValueError, match='\'first\'.*"unabsorbed" or "any"'):
        ampatch.debug(stop_at="first")
    with pytest.raises(ValueError, match="lost=1.5"):
        Histogram().static_scale(1.5)


# What the dynamic loss scale absorbs


def debugged_steps(function, count, *, lr=0.0, stop_at="unabsorbed", **settings):
    """The debugger after `count` steps of a small model with `function` in its backward."""
    model = nn.Sequential(linear(0.5), backward_by(function), linear(0.5))
    settings = {"level": "O2", "init_scale": 2.0**10, **settings}
    model, optimizer = managed(model, dtype=torch.float16, lr=lr, **settings)
    with ampatch.debug(model, stop_at=stop_at) as debugger:
        for _ in range(count):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 4)).sum()
            pass_back(loss, optimizer)
            optimizer.step()
    return debugger


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflows_that_the_scale_absorbs_are_listed_and_no_finding(level):
    """float16 ends at 65504: 1000 times a gradient of 1 fits from scale 32 on."""
    debugger = debugged_steps(lambda gradient: gradient * 1000, 8, level=level)
    assert debugger.report is None
    assert [
        (report.step, report.loss_scale, report.value, report.at_scale_1)
        for report in debugger.passed_over
    ] == [(step, 2.0 ** (10 - step), "inf", 2000.0) for step in range(5)]
    first = debugger.passed_over[0]
    assert (first.operator, first.module, first.parameters) == ("aten.mul", "1", ["0.weight"])
    assert first.where == "gradient of the parameter 0.weight"
    assert first.largest_input == 2.0 * 2**10 and first.input_is_finite
    ampatch.deactivate()
    debugger = debugged_steps(lambda gradient: gradient * 1000, 1, level=level, stop_at="any")
    assert (debugger.report.phase, debugger.report.step, debugger.step) == ("backward", 0, 1)
    assert debugger.passed_over == [] and "0.weight" in debugger.report.parameters


@pytest.mark.parametrize(
    ("function", "settings", "at_1"),
    [
        (lambda gradient: gradient * 1000, {"loss_scale": 1024.0}, 2000.0),
        (lambda gradient: gradient * 60000, {}, 120000.0),
        (lambda gradient: gradient / 0, {}, float("inf")),
        (lambda gradient: (gradient - gradient) / 0, {}, float("inf")),
        (lambda gradient: gradient * 1000, {"min_loss_scale": 64.0}, 2000.0),
        (lambda gradient: gradient * 60000, {"init_scale": 1.0}, 120000.0),
    ],
    ids=["static", "large", "division", "nan", "floor", "scale 1"],
)
def test_what_no_scale_absorbs_is_reported_at_once(function, settings, at_1):
    debugger = debugged_steps(function, 2, **settings)
    assert (debugger.report.step, debugger.report.phase) == (0, "backward")
    assert debugger.report.at_scale_1 == at_1 and debugger.report.module == "1"
    assert debugger.passed_over == []


def test_an_operator_that_cannot_be_computed_again_is_waited_for_until_scale_1():
    def overwriting(gradient):
        return gradient.clone().mul_(60000).mul_(60000)

    debugger = debugged_steps(overwriting, 6, init_scale=8.0)
    assert [report.loss_scale for report in debugger.passed_over] == [8.0, 4.0, 2.0]
    assert (debugger.report.step, debugger.report.loss_scale) == (3, 1.0)


def test_a_pass_outside_of_a_block_has_no_scale_to_absorb():
    bomb = backward_by(lambda gradient: gradient * 60000)
    model = nn.Sequential(linear(0.5), bomb, linear(0.5))
    model, optimizer = managed(model, "O1", torch.float16)
    with ampatch.debug(model) as debugger:
        pass_back(model(torch.ones(1, 4)).sum() * 1e-6, optimizer)
        assert debugger.report is None
        model(torch.ones(1, 4)).sum().backward()
    assert debugger.report.loss_scale is None and debugger.report.phase == "backward"


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_hook_that_the_script_sets_later_is_seen(level):
    model, optimizer = managed(linear(0.5), level, torch.float16, init_scale=16.0)
    with ampatch.debug(model) as debugger:
        model.weight.register_hook(lambda gradient: gradient * float("nan"))
        pass_back(model(torch.ones(1, 4)).sum(), optimizer)
    assert (debugger.report.operator, debugger.report.phase) == ("aten.mul", "backward")


def test_a_skip_that_no_backward_pass_explains_is_counted():
    model, optimizer = managed(linear(0.5), "O1", torch.float16, lr=0.0, init_scale=16.0)
    with ampatch.debug(model) as debugger:
        for factor in (1.0, float("inf"), 1.0):
            with ampatch.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled:
                scaled.backward()
                model.weight.grad.mul_(factor)
            optimizer.step()
            optimizer.zero_grad()
    assert debugger.report is None and debugger.passed_over == []
    assert debugger.unseen_skips == 1


@pytest.mark.parametrize(
    "level, weight, operator, value",
    [
        ("O1", float("nan"), "aten._to_copy", "nan"),
        ("O2", float("nan"), "aten._to_copy", "nan"),
        ("O3", float("nan"), "aten.mm", "nan"),
        ("O2", 1e6, "aten._to_copy", "inf"),
    ],
)
def test_a_weight_is_named_by_the_first_operator_that_reads_it(level, weight, operator, value):
    """At O1 and O2 that is the cast of the weights; a NaN has come from outside."""
    model, _ = managed(linear(weight), level, torch.float16)
    with ampatch.debug(model) as debugger:
        model(torch.ones(1, 4))
    report = debugger.report
    assert (report.operator, report.value) == (operator, value)
    assert report.input_is_finite == (value == "inf")
    assert value == "nan" or report.largest_input == weight


@pytest.mark.parametrize("scale, at_1", [("dynamic", None), (2.0, 2e38)])
def test_complex_gradients(scale, at_1):
    """The loss passes at this scale, the gradient of the complex weight does not."""
    model = nn.ParameterList([torch.full((2,), 1e-30 + 0j, dtype=torch.complex64)])
    model, optimizer = managed(model, "O1", torch.float16, loss_scale=scale, init_scale=2.0)
    with ampatch.debug(model) as debugger:
        pass_back((model[0] * 2e38).real.sum(), optimizer)
    assert len(debugger.passed_over) == (at_1 is None)
    report = debugger.report or debugger.passed_over[0]
    assert (report.dtype, report.phase) == (torch.complex64, "backward")
    assert report.parameters == ["0"] and report.at_scale_1 == pytest.approx(2e38, rel=1e-3)
