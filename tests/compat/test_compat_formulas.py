"""apex.optimizers against their formulas, in float64."""

import math

import pytest
import torch
from apex_optimizers import START, close, gradients, parameters, run

from ampatch.compat.apex import optimizers
from ampatch.compat.apex.parallel.larc import LARC


def adam_formula(steps, lr, decay, adam_w, beta1=0.9, beta2=0.999, eps=1e-8):
    """Adam without bias correction."""
    params = [value.double() for value in START]
    first = [torch.zeros_like(p) for p in params]
    second = [torch.zeros_like(p) for p in params]
    for step in range(steps):
        for i, grad in enumerate(gradients(step)):
            g = grad.double() + (0 if adam_w else decay * params[i])
            first[i] = beta1 * first[i] + (1 - beta1) * g
            second[i] = beta2 * second[i] + (1 - beta2) * g * g
            update = first[i] / (second[i].sqrt() + eps)
            params[i] = params[i] - lr * (update + (decay * params[i] if adam_w else 0))
    return params


@pytest.mark.parametrize("mode", [True, False])
def test_adam_without_bias_correction(mode):
    options = {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": mode}
    ours = run(lambda p: optimizers.FusedAdam(p, bias_correction=False, **options))
    close(ours, adam_formula(4, 0.01, 0.1, mode))
    corrected = run(lambda p: optimizers.FusedAdam(p, **options))
    assert not torch.allclose(ours[0], corrected[0], atol=1e-3)  # the option does something


def test_bias_correction_group_by_group():
    def make(params):
        return optimizers.FusedAdam(
            [{"params": params[:1], "bias_correction": False}, {"params": params[1:]}], lr=0.01
        )

    ours = run(make)
    close(ours[:1], adam_formula(4, 0.01, 0, True)[:1])
    close(ours[1:], run(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0))[1:])


def test_sgd_with_weight_decay_after_momentum():
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2, "wd_after_momentum": True}
    ours = run(lambda p: optimizers.FusedSGD(p, **options))
    params = [value.double() for value in START]
    velocity = [torch.zeros_like(p) for p in params]
    for step in range(4):
        for i, grad in enumerate(gradients(step)):
            velocity[i] = 0.9 * velocity[i] + grad.double()
            params[i] = params[i] - 0.1 * (velocity[i] + 0.2 * params[i])
    close(ours, params)


def test_adagrad_with_decoupled_weight_decay():
    ours = run(lambda p: optimizers.FusedAdagrad(p, lr=0.1, weight_decay=0.2, adagrad_w_mode=True))
    params = [value.double() for value in START]
    total = [torch.zeros_like(p) for p in params]
    for step in range(4):
        for i, grad in enumerate(gradients(step)):
            total[i] = total[i] + grad.double() ** 2
            update = grad.double() / (total[i].sqrt() + 1e-10) + 0.2 * params[i]
            params[i] = params[i] - 0.1 * update
    close(ours, params)


def lamb_formula(
    lr,
    weight_decay=0.01,
    adam_w_mode=True,
    grad_averaging=True,
    bias_correction=True,
    max_grad_norm=1.0,
    use_nvlamb=False,
):
    beta1, beta2, eps, decay = 0.9, 0.999, 1e-6, weight_decay
    params = [value.double() for value in START]
    first = [torch.zeros_like(p) for p in params]
    second = [torch.zeros_like(p) for p in params]
    for step in range(1, 5):
        grads = [grad.double() for grad in gradients(step - 1)]
        norm = math.sqrt(sum(float((grad * grad).sum()) for grad in grads))
        if max_grad_norm and norm > max_grad_norm:
            grads = [grad * (max_grad_norm / norm) for grad in grads]
        for i, grad in enumerate(grads):
            if not adam_w_mode:
                grad = grad + decay * params[i]
            first[i] = beta1 * first[i] + (1 - beta1 if grad_averaging else 1) * grad
            second[i] = beta2 * second[i] + (1 - beta2) * grad * grad
            m = first[i] / (1 - beta1**step if bias_correction else 1)
            v = second[i] / (1 - beta2**step if bias_correction else 1)
            update = m / (v.sqrt() + eps) + (decay * params[i] if adam_w_mode else 0)
            ratio, size, length = 1.0, float(params[i].norm()), float(update.norm())
            if (decay or use_nvlamb) and size > 0 and length > 0:
                ratio = size / length
            params[i] = params[i] - lr * ratio * update
    return params


LAMB = {
    "defaults": {},
    "L2": {"adam_w_mode": False},
    "sums": {"grad_averaging": False},
    "uncorrected": {"bias_correction": False},
    "unclipped": {"max_grad_norm": 0.0},
    "clipped at times": {"max_grad_norm": 9.0},
    "no decay": {"weight_decay": 0.0},
    "nvlamb": {"weight_decay": 0.0, "use_nvlamb": True},
}


@pytest.mark.parametrize("options", LAMB.values(), ids=LAMB)
def test_lamb(options):
    ours = run(lambda p: optimizers.FusedLAMB(p, lr=0.05, **options))
    close(ours, lamb_formula(0.05, **options))


def novograd_formula(
    lr,
    decay,
    reg_inside_moment=False,
    grad_averaging=True,
    norm_type=2,
    init_zero=False,
    bias_correction=True,
):
    beta1, beta2, eps, infinite = 0.95, 0.98, 1e-8, norm_type == 0
    params = [value.double() for value in START]
    first = [torch.zeros_like(p) for p in params]
    norms: list = [None] * len(params)
    for step in range(1, 5):
        for i, grad in enumerate(gradients(step - 1)):
            g = grad.double()
            now = float(g.abs().max() if infinite else g.norm())
            before = (0.0 if init_zero else now) if norms[i] is None else norms[i]
            if infinite:
                norms[i] = beta2 * before + (1 - beta2) * now
            else:
                norms[i] = math.sqrt(beta2 * before**2 + (1 - beta2) * now**2)
            v = norms[i] / (math.sqrt(1 - beta2**step) if bias_correction else 1) + eps
            share = 1 - beta1 if grad_averaging else 1
            correction = 1 - beta1**step if bias_correction else 1
            if reg_inside_moment:
                first[i] = beta1 * first[i] + share * (g / v + decay * params[i])
                params[i] = params[i] - lr * first[i] / correction
            else:
                first[i] = beta1 * first[i] + share * g
                params[i] = params[i] - lr * (first[i] / correction / v + decay * params[i])
    return params


NOVOGRAD = {
    "defaults": {},
    "inside": {"reg_inside_moment": True},
    "sums": {"grad_averaging": False},
    "largest": {"norm_type": 0},
    "from zero": {"init_zero": True},
    "uncorrected": {"bias_correction": False},
}


@pytest.mark.parametrize("options", NOVOGRAD.values(), ids=NOVOGRAD)
def test_novograd(options):
    settings = {"lr": 0.05, "betas": (0.95, 0.98), "weight_decay": 0.1, **options}
    ours = run(lambda p: optimizers.FusedNovoGrad(p, **settings))
    close(ours, novograd_formula(0.05, 0.1, **options))


@pytest.mark.parametrize("clip", [True, False])
def test_larc(clip):
    from apex.parallel import LARC as by_module

    lr, decay, trust = 0.4, 0.1, 0.05
    larcs = []

    def make(params):
        larcs.append(LARC(torch.optim.SGD(params, lr=lr, weight_decay=decay), trust, clip))
        return larcs[0]

    ours = run(make)
    params = [value.double() for value in START]
    for step in range(4):
        for i, grad in enumerate(gradients(step)):
            g, size, length = grad.double(), float(params[i].norm()), float(grad.double().norm())
            if size and length:
                rate = trust * size / (length + decay * size + 1e-8)
                rate = min(rate / lr, 1) if clip else rate
                g = (g + decay * params[i]) * rate
            params[i] = params[i] - lr * g
    close(ours, params)
    assert larcs[0].param_groups[0]["weight_decay"] == decay
    assert isinstance(by_module(torch.optim.SGD(parameters(), lr=0.1)), LARC)


def test_larc_gives_the_weight_decay_back_after_an_exception():
    inner = torch.optim.SGD(parameters(), lr=0.1, weight_decay=0.3)
    inner.register_step_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LARC(inner).step()
    assert inner.param_groups[0]["weight_decay"] == 0.3
