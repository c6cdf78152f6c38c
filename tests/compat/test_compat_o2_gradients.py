"""O2 without `zero_grad`: what a step has used is gone when the next block begins, as in apex.

apex's steps dropped the gradients of masters, and its blocks those of the model's half weights.
The oracle is FP32 training that zeroes by hand, weight by weight.
"""

import math
from collections import OrderedDict

import pytest
import torch
from torch import nn

import ampatch

SETTINGS = {
    "dynamic": {"loss_scale": "dynamic"},
    "static": {"loss_scale": 128.0},
    "one": {"loss_scale": 1.0},
    "norms in half": {"keep_batchnorm_fp32": False},
}


def network():
    layers = {"table": nn.Embedding(4, 6), "first": nn.Linear(6, 8), "norm": nn.BatchNorm1d(8)}
    return nn.Sequential(OrderedDict(**layers, tanh=nn.Tanh(), last=nn.Linear(8, 1)))


INDEX, TARGET = torch.arange(16) % 4, (torch.arange(16) % 4).float()[:, None] / 4


def model_and_optimizer(lr=0.05, **options):
    torch.manual_seed(0)
    model = network()
    return model, torch.optim.SGD(model.parameters(), lr=lr, **options)


def loss_of(model, factor=1.0):
    return (model(INDEX).float() - TARGET).pow(2).mean() * factor


def begin(amp, model, optimizers, **options):
    """A dynamic scale begins where nothing overflows."""
    amp.initialize(model, optimizers, **{"opt_level": "O2", "verbosity": 0, **options})
    if ampatch.loss_scale() == 2.0**16:
        ampatch.set_loss_scale(256.0)


def backward(amp, model, optimizers, factor=1.0, **options):
    with amp.scale_loss(loss_of(model, factor), optimizers, **options) as scaled:
        scaled.backward()


def train(amp, model, optimizer, accumulate, delay=False, overflow=None):
    for step in range(6):
        for number in range(accumulate):
            factor = math.inf if (step, number) == overflow else 1.0
            waits = delay and number + 1 < accumulate
            backward(amp, model, optimizer, factor, delay_unscale=waits)
        optimizer.step()


def reference(accumulate, keeps_norm, skipped=()):
    """FP32, which zeroes after each step what apex dropped, and keeps the rest."""
    model, optimizer = model_and_optimizer()
    for step in range(6):
        for _ in range(accumulate):
            loss_of(model).backward()
        if step not in skipped:
            optimizer.step()
        for name, param in model.named_parameters():
            if not (keeps_norm and name.startswith("norm")):
                param.grad = None
    return model


def close(model, other):
    both = [[param.detach() for param in net.parameters()] for net in (model, other)]
    torch.testing.assert_close(*both, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("delay", [False, True], ids=["unscaled", "delay_unscale"])
def test_half_weights_begin_anew_and_fp32_ones_accumulate(amp, settings, accumulate, delay):
    model, optimizer = model_and_optimizer()
    begin(amp, model, optimizer, **SETTINGS[settings])
    train(amp, model, optimizer, accumulate, delay)
    keeps_norm = settings != "norms in half"
    close(model, reference(accumulate, keeps_norm))
    other = reference(accumulate, not keeps_norm)
    assert not torch.allclose(other.norm.weight, model.norm.weight, atol=1e-3)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_overflow_in_the_middle_of_an_accumulation_costs_one_step(amp, accumulate, fused):
    model, optimizer = model_and_optimizer(fused=fused)
    begin(amp, model, optimizer, keep_batchnorm_fp32=False)
    train(amp, model, optimizer, accumulate, overflow=(2, 0))
    close(model, reference(accumulate, keeps_norm=False, skipped=(2,)))
    assert ampatch.step_counts(optimizer)[:2] == (5, 1)


def test_gradients_are_there_after_the_step_and_gone_in_the_next_block(amp):
    model, optimizer = model_and_optimizer()
    begin(amp, model, optimizer)
    backward(amp, model, optimizer)
    optimizer.step()
    after = {name: param.grad for name, param in model.named_parameters()}
    assert all(grad is not None and bool(grad.any()) for grad in after.values())
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        assert all(param.grad is None for param in model.first.parameters())
        scaled.backward()
    assert torch.allclose(model.last.bias.grad, after["last.bias"], rtol=0.2)  # not twice


@pytest.mark.parametrize(
    ("package", "options"),
    [
        *(("apex", {"opt_level": level}) for level in ("O0", "O1", "O3")),
        ("apex", {"cast_model_type": False}),
        ("apex", {"master_weights": False}),
        ("ampatch", {}),
    ],
)
def test_elsewhere_gradients_accumulate_as_ever(amp, package, options):
    """At other levels, without masters, and without the package."""
    package = amp if package == "apex" else ampatch
    model, optimizer = model_and_optimizer(lr=0.0)
    begin(package, model, optimizer, **options)
    grads = []
    for _ in range(3):
        backward(package, model, optimizer)
        optimizer.step()
        grads.append(model.last.bias.grad.item())
    assert grads == pytest.approx([grads[0], 2 * grads[0], 3 * grads[0]], rel=0.01)


@pytest.mark.parametrize("together", [True, False])
def test_each_optimizer_drops_what_its_own_step_has_used(amp, together):
    """The second one steps every second time, and accumulates between."""
    torch.manual_seed(0)
    model = network()
    parts = [list(part.parameters()) for part in (model.first, model.last)]
    optimizers = [torch.optim.SGD(part, lr=0.0) for part in parts]
    begin(amp, model, optimizers, num_losses=2)
    grads = []
    for step in range(6):
        if together:
            backward(amp, model, optimizers)
        else:
            for number, optimizer in enumerate(optimizers):
                backward(amp, model, optimizer, loss_id=number)
        optimizers[0].step()
        grads.append((model.first.bias.grad.clone(), model.last.bias.grad.clone()))
        if step % 2:
            optimizers[1].step()
    (first, last), room = grads[0], {"rtol": 0.05, "atol": 1e-3}
    for step, (of_first, of_last) in enumerate(grads):
        if together:
            torch.testing.assert_close(of_first, first, **room)
            torch.testing.assert_close(of_last, last * (1 + step % 2), **room)
    assert grads[-1][1].isfinite().all()


def test_a_gan_whose_losses_reach_both_models(amp):
    """The generator's backward pass leaves scaled gradients in the discriminator: they go too."""
    torch.manual_seed(0)
    maker, judge = nn.Linear(2, 3), nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in (maker, judge)]
    for model, optimizer in zip((maker, judge), optimizers, strict=True):
        begin(amp, model, optimizer)
    x, grads = torch.randn(8, 2), []
    for _ in range(3):
        with amp.scale_loss(judge(maker(x).detach()).float().mean(), optimizers[1]) as scaled:
            scaled.backward()
        grads.append(judge.weight.grad.clone())
        optimizers[1].step()
        with amp.scale_loss(judge(maker(x)).float().mean(), optimizers[0]) as scaled:
            scaled.backward()
        grads.append(maker.weight.grad.clone())
        optimizers[0].step()
    for later in (2, 4):
        torch.testing.assert_close(grads[later], grads[0], rtol=0.01, atol=1e-4)
        torch.testing.assert_close(grads[later + 1], grads[1], rtol=0.01, atol=1e-4)


def test_norms_that_hold_an_inf_say_what_to_do(amp, caplog):
    """As in apex they are not dropped; a step with them is skipped, and names `zero_grad`."""
    caplog.set_level("INFO", "ampatch")
    model, optimizer = model_and_optimizer()
    begin(amp, model, optimizer, verbosity=1)
    backward(amp, model, optimizer, math.inf)
    optimizer.step()
    assert "zero_grad" not in caplog.text
    backward(amp, model, optimizer)
    optimizer.step()
    assert "gradients of an earlier overflow are still in p.grad" in caplog.text
    optimizer.zero_grad()
    backward(amp, model, optimizer)
    optimizer.step()
    assert not ampatch.step_was_skipped(optimizer)
