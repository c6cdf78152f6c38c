"""Any graph of models, optimizers and losses follows its FP32 run.

All have a dynamic loss scale, so the half type would change nothing but roundings.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch

HALF = torch.float16


def net(seed, inputs=4, outputs=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def batch(seed, columns=4):
    return torch.randn(6, columns, generator=torch.Generator().manual_seed(seed))


def sgd(*modules, lr=0.1):
    params = [parameter for module in modules for parameter in module.parameters()]
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


class Plain:
    """The same loop without ampatch."""

    def __init__(self, models, optimizers):
        self.models, self.optimizers = models, optimizers

    def backward(self, loss, optimizers, *loss_id, delay_unscale=False, **options):
        loss.backward(**options)

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


class Mixed(Plain):
    def __init__(self, models, optimizers, level, losses=1):
        super().__init__(models, optimizers)
        settings = {"loss_scale": "dynamic", "init_scale": 256.0, "verbosity": 0}
        ampatch.initialize(
            *(models, optimizers), opt_level=level, dtype=HALF, num_losses=losses, **settings
        )

    def backward(self, loss, optimizers, *loss_id, delay_unscale=False, **options):
        with ampatch.scale_loss(loss, optimizers, *loss_id, delay_unscale=delay_unscale) as scaled:
            scaled.backward(**options)

    def skipped(self):
        return [ampatch.step_was_skipped(optimizer) for optimizer in self.optimizers]


def follow(program, make, level, losses=1):
    """Run `program` plainly and mixed; the weights must agree to half's precision."""
    results = []
    for run in (Plain(*make()), Mixed(*make(), level, losses)):
        start = [p.detach().float().clone() for m in run.models for p in m.parameters()]
        for step in range(4):
            program(run, step)
        results.append([v.float() for m in run.models for v in m.state_dict().values()])
    ampatch.deactivate()
    assert max((a - b).abs().max().item() for a, b in zip(start, results[0], strict=True)) > 0.1
    for expected, found in zip(*results, strict=True):
        assert torch.allclose(found, expected, atol=0.03, rtol=0.02)


# m models, n optimizers, l losses


def three_by_two():
    models = [net(0), net(1, 3), net(2, 3)]
    return models, [sgd(models[0]), sgd(models[1], models[2])]


def losses_of(models, step):
    hidden = models[0](batch(step))
    first = F.mse_loss(models[1](hidden).float(), batch(step + 50, 3))
    second = F.mse_loss(models[2](hidden).float(), batch(step + 90, 3))
    return first, second


def test_three_models_two_optimizers_two_losses(opt_level):
    def program(run, step):
        for optimizer in run.optimizers:
            optimizer.zero_grad()
        first, second = losses_of(run.models, step)
        run.backward(first, run.optimizers, 0, retain_graph=True)
        run.backward(second, run.optimizers, 1)
        run.step()

    follow(program, three_by_two, opt_level, losses=2)


def test_one_loss_several_times_through_one_graph(opt_level):
    """`retain_graph`: the same graph for one optimizer after the other; delayed in between."""

    def program(run, step):
        loss = sum(losses_of(run.models, step))
        run.backward(loss, run.optimizers, retain_graph=True, delay_unscale=True)
        run.backward(loss, [run.optimizers[0], *run.optimizers], 1)
        run.step()
        for optimizer in run.optimizers:
            optimizer.zero_grad()

    follow(program, three_by_two, opt_level, losses=2)


@pytest.mark.parametrize("given", ["first", "second", "both"])
def test_an_overflow_skips_only_what_it_fed(opt_level, given):
    models = [net(0), net(1)]
    optimizers = [sgd(model) for model in models]
    run = Mixed(models, optimizers, opt_level, losses=3)
    which = {"first": [0], "second": [1], "both": [0, 1]}[given]
    for index in (0, 1):
        run.backward(models[index](batch(index)).float().sum(), optimizers[index], index)
    bad = sum(models[index](batch(5)).float().sum() for index in which) * math.inf
    run.backward(bad, [optimizers[index] for index in which], 2)
    run.step()
    assert run.skipped() == [index in which for index in (0, 1)]
    assert [ampatch.loss_scale(number) for number in range(3)] == [256.0, 256.0, 128.0]


# A parameter in several optimizers


GIVEN = pytest.mark.parametrize("given", [[0, 1], [1, 0], [0], [1]])


def tied():
    models = [net(0)]
    return models, [sgd(models[0]), sgd(models[0][2], lr=0.05)]


@GIVEN
@pytest.mark.parametrize("delay", [False, True])
def test_a_parameter_of_two_optimizers_is_unscaled_once(opt_level, given, delay):
    """Also when the loss is given only one of them; two losses add up."""

    def program(run, step):
        for number in (0, 1):
            loss = F.mse_loss(run.models[0](batch(step + number)).float(), batch(step + 50, 3))
            run.backward(
                loss, [run.optimizers[i] for i in given], delay_unscale=delay and number == 0
            )
        run.step()
        for optimizer in run.optimizers:
            optimizer.zero_grad()

    follow(program, tied, opt_level)


def test_two_optimizers_have_one_master_for_a_parameter_of_both():
    models, optimizers = tied()
    run = Mixed(models, optimizers, "O2")
    first, second = (list(ampatch.master_params(optimizer)) for optimizer in optimizers[:2])
    assert first[2] is second[0] and first[3] is second[1]
    run.backward(models[0](batch(0)).sum(), optimizers[0])
    optimizers[0].step()
    optimizers[1].step()
    assert torch.equal(models[0].state_dict()["2.weight"], first[2])
    ampatch.deactivate()
    assert all(
        a is b for a, b in zip(optimizers[1].param_groups[0]["params"], models[0][2].parameters())
    )


@pytest.mark.parametrize(
    "where, skipped", [(0, [True, False, True, False]), (2, [True, True, False, True])]
)
def test_an_overflow_concerns_all_holders_of_its_parameter_and_no_others(opt_level, where, skipped):
    """The first optimizer has all, the others share a layer or the other with it."""
    model = net(0)
    run = Mixed([model], [sgd(model), sgd(model[2]), sgd(model[0]), sgd(model[2])], opt_level)
    with ampatch.scale_loss(model(batch(0)).float().sum(), run.optimizers[0]) as scaled:
        scaled.backward()
        model[where].bias.grad.fill_(math.nan)
    before = [value.clone() for value in model.state_dict().values()]
    run.step()
    assert run.skipped() == skipped
    after = list(model.state_dict().values())
    assert all(bool(value.isfinite().all()) for value in after)
    stood = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    assert stood == [where == 0] * 2 + [where == 2] * 2


@GIVEN
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_clean_block_hides_no_earlier_overflow_of_a_shared_parameter(level, given):
    models, optimizers = tied()
    run = Mixed(models, optimizers, level)
    pair = [optimizers[index] for index in given]
    run.backward(models[0](batch(0)).float().sum() * math.inf, pair)
    run.backward(models[0](batch(1)).float().sum(), pair)
    run.step()
    assert run.skipped() == [True, True]


@GIVEN
def test_a_failed_block_leaves_the_earlier_gradients_of_a_shared_parameter(opt_level, given):
    models, optimizers = tied()
    run = Mixed(models, optimizers, opt_level)
    pair = [optimizers[index] for index in given]
    run.backward(F.mse_loss(models[0](batch(0)).float(), batch(50, 3)), pair)
    updated = [p for one in optimizers for p in ampatch.master_params(one)]
    before = [param.grad.clone() for param in updated]
    with pytest.raises(KeyboardInterrupt):
        with ampatch.scale_loss(models[0](batch(1)).float().sum(), pair) as scaled:
            scaled.backward()
            raise KeyboardInterrupt
    assert all(param.grad is not None for param in updated)
    assert all(torch.equal(a, b.grad) for a, b in zip(before, updated, strict=True))


# Inside the block


@pytest.mark.parametrize("whose", ["model", "optimizer"])
def test_zero_grad_inside_the_block(opt_level, whose):
    """Before `backward`, where some put it: what was there is gone, not only set aside."""

    def program(run, step):
        (model,), (optimizer,) = run.models, run.optimizers
        loss = F.mse_loss(model(batch(step)).float(), batch(step + 50, 3))
        zero = {"model": model, "optimizer": optimizer}[whose].zero_grad
        if isinstance(run, Mixed):
            with ampatch.scale_loss(loss, optimizer) as scaled:
                zero()
                scaled.backward()
        else:
            zero()
            loss.backward()
        optimizer.step()

    def make():
        model = net(0)
        return [model], [sgd(model)]

    follow(program, make, opt_level)


def test_a_step_inside_the_block_is_refused(opt_level):
    model = net(0)
    optimizer = sgd(model)
    run = Mixed([model], [optimizer], opt_level)
    before = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(ampatch.AmpatchError, match="SGD.step.. inside the .*scale_loss block"):
        with ampatch.scale_loss(model(batch(0)).float().sum(), optimizer) as scaled:
            scaled.backward()
            optimizer.step()
    assert all(map(torch.equal, before, model.state_dict().values()))
    run.backward(model(batch(0)).float().sum(), optimizer)
    optimizer.step()
    assert not ampatch.step_was_skipped(optimizer)


def test_clipping_inside_the_block_is_reported_and_spoils_nothing(opt_level, caplog):
    gradients = []
    for clips in (False, True):
        model = net(0)
        optimizer = sgd(model)
        ampatch.initialize(model, optimizer, opt_level=opt_level, dtype=HALF, loss_scale=64.0)
        with ampatch.scale_loss(model(batch(0)).float().sum(), optimizer) as scaled:
            scaled.backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(ampatch.master_params(optimizer), 1e9)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        gradients.append([param.grad for param in ampatch.master_params(optimizer)])
        ampatch.deactivate()
    assert all(map(torch.equal, *gradients))
    assert "SGD: gradients are clipped inside its ampatch.scale_loss block" in caplog.text


@pytest.mark.parametrize("through", ["master_params", "model.parameters"])
def test_clipping_what_delay_unscale_left(opt_level, through):
    """The last block may have been delayed too: the norm is the unscaled gradients'."""
    model, plain, other = net(0), net(0), net(1)
    optimizer, second = sgd(model), sgd(other)
    run = Mixed([model, other], [optimizer, second], opt_level)
    for seed in (0, 1):
        run.backward(model(batch(seed)).float().square().sum(), optimizer, delay_unscale=True)
        plain(batch(seed)).square().sum().backward()
    run.backward(other(batch(0)).float().sum(), second, delay_unscale=True)
    waiting = [param.grad.clone() for param in ampatch.master_params(second)]
    params = ampatch.master_params(optimizer) if through == "master_params" else model.parameters()
    norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    assert norm.item() == pytest.approx(expected.item(), rel=0.02)
    for param, reference in zip(ampatch.master_params(optimizer), plain.parameters(), strict=True):
        assert torch.allclose(param.grad.float(), reference.grad, atol=0.02)
    left = [param.grad for param in ampatch.master_params(second)]
    assert all(map(torch.equal, waiting, left)), "another optimizer's still wait"
