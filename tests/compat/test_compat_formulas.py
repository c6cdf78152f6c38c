"""apex.optimizers against their formulas, in float64."""

import collections
import math

import pytest
import torch
from apex_optimizers import START, close, gradients, parameters, run

from ampatch.compat.apex import optimizers
from ampatch.compat.apex.parallel.larc import LARC


def by_formula(update):
    """The parameters after four times `update(param, grad, state, step)`; state begins with 0."""
    params = [value.double() for value in START]
    states = [collections.defaultdict(float) for _ in START]
    for step in range(1, 5):
        for i, grad in enumerate(gradients(step - 1)):
            params[i] = update(params[i], grad.double(), states[i], step)
    return params


def adam_formula(decay, adam_w, lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8):
    """Adam without bias correction."""

    def update(p, g, state, step):
        g = g + (0 if adam_w else decay * p)
        state["m"] = beta1 * state["m"] + (1 - beta1) * g
        state["v"] = beta2 * state["v"] + (1 - beta2) * g * g
        return p - lr * (state["m"] / (state["v"].sqrt() + eps) + (decay * p if adam_w else 0))

    return by_formula(update)


@pytest.mark.parametrize("mode", [True, False])
def test_adam_without_bias_correction(mode):
    options = {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": mode}
    ours = run(lambda p: optimizers.FusedAdam(p, bias_correction=False, **options))
    close(ours, adam_formula(0.1, mode))
    corrected = run(lambda p: optimizers.FusedAdam(p, **options))
    assert not torch.allclose(ours[0], corrected[0], atol=1e-3)  # the option does something


def test_bias_correction_group_by_group():
    def make(params):
        return optimizers.FusedAdam(
            [{"params": params[:1], "bias_correction": False}, {"params": params[1:]}], lr=0.01
        )

    ours = run(make)
    close(ours[:1], adam_formula(0, True)[:1])
    close(ours[1:], run(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0))[1:])


def test_sgd_with_weight_decay_after_momentum():
    def update(p, g, state, step):
        state["velocity"] = 0.9 * state["velocity"] + g
        return p - 0.1 * (state["velocity"] + 0.2 * p)

    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2, "wd_after_momentum": True}
    close(run(lambda p: optimizers.FusedSGD(p, **options)), by_formula(update))


def test_adagrad_with_decoupled_weight_decay():
    def update(p, g, state, step):
        state["sum"] = state["sum"] + g**2
        return p - 0.1 * (g / (state["sum"].sqrt() + 1e-10) + 0.2 * p)

    options = {"lr": 0.1, "weight_decay": 0.2, "adagrad_w_mode": True}
    close(run(lambda p: optimizers.FusedAdagrad(p, **options)), by_formula(update))


def lamb_formula(
    weight_decay=0.01,
    adam_w_mode=True,
    grad_averaging=True,
    bias_correction=True,
    max_grad_norm=1.0,
    use_nvlamb=False,
):
    lr, beta1, beta2, eps, decay = 0.05, 0.9, 0.999, 1e-6, weight_decay

    def update(p, g, state, step):
        norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in gradients(step - 1)))
        if max_grad_norm and norm > max_grad_norm:
            g = g * (max_grad_norm / norm)
        if not adam_w_mode:
            g = g + decay * p
        state["m"] = beta1 * state["m"] + (1 - beta1 if grad_averaging else 1) * g
        state["v"] = beta2 * state["v"] + (1 - beta2) * g * g
        m = state["m"] / (1 - beta1**step if bias_correction else 1)
        v = state["v"] / (1 - beta2**step if bias_correction else 1)
        change = m / (v.sqrt() + eps) + (decay * p if adam_w_mode else 0)
        size, length = float(p.norm()), float(change.norm())
        has_ratio = (decay or use_nvlamb) and size > 0 and length > 0
        return p - lr * (size / length if has_ratio else 1) * change

    return by_formula(update)


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
    close(run(lambda p: optimizers.FusedLAMB(p, lr=0.05, **options)), lamb_formula(**options))


def novograd_formula(
    reg_inside_moment=False, grad_averaging=True, norm_type=2, init_zero=False, bias_correction=True
):
    lr, decay, beta1, beta2, eps = 0.05, 0.1, 0.95, 0.98, 1e-8

    def update(p, g, state, step):
        now = float(g.abs().max() if norm_type == 0 else g.norm())
        before = state.get("norm", 0.0 if init_zero else now)
        if norm_type == 0:
            state["norm"] = beta2 * before + (1 - beta2) * now
        else:
            state["norm"] = math.sqrt(beta2 * before**2 + (1 - beta2) * now**2)
        v = state["norm"] / (math.sqrt(1 - beta2**step) if bias_correction else 1) + eps
        share = 1 - beta1 if grad_averaging else 1
        correction = 1 - beta1**step if bias_correction else 1
        if reg_inside_moment:
            state["m"] = beta1 * state["m"] + share * (g / v + decay * p)
            return p - lr * state["m"] / correction
        state["m"] = beta1 * state["m"] + share * g
        return p - lr * (state["m"] / correction / v + decay * p)

    return by_formula(update)


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
    close(run(lambda p: optimizers.FusedNovoGrad(p, **settings)), novograd_formula(**options))


@pytest.mark.parametrize("clip", [True, False])
def test_larc(clip):
    from apex.parallel import LARC as by_module

    lr, decay, trust = 0.4, 0.1, 0.05

    def update(p, g, state, step):
        size, length = float(p.norm()), float(g.norm())
        if size and length:
            rate = trust * size / (length + decay * size + 1e-8)
            g = (g + decay * p) * (min(rate / lr, 1) if clip else rate)
        return p - lr * g

    larcs = []

    def make(params):
        larcs.append(by_module(torch.optim.SGD(params, lr=lr, weight_decay=decay), trust, clip))
        return larcs[0]

    close(run(make), by_formula(update))
    assert larcs[0].param_groups[0]["weight_decay"] == decay


def test_larc_gives_the_weight_decay_back_after_an_exception():
    inner = torch.optim.SGD(parameters(), lr=0.1, weight_decay=0.3)
    inner.register_step_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LARC(inner).step()
    assert inner.param_groups[0]["weight_decay"] == 0.3
