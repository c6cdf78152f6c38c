"""apex.optimizers against torch's, and against their formulas."""

import collections
import copy
import math
import re

import pytest
import torch
from apex_optimizers import START, as_apex_saves, close, gradients, parameters, run
from torch import nn

import ampatch
from ampatch.compat.apex import optimizers
from ampatch.compat.apex.optimizers import common
from ampatch.compat.apex.parallel.larc import LARC


def test_default_learning_rates_are_those_of_apex():
    """The other defaults are those of the formulas, or of torch."""
    rates = {"FusedAdam": 1e-3, "FusedLAMB": 1e-3, "FusedNovoGrad": 1e-3, "FusedAdagrad": 1e-2}
    for name, rate in rates.items():
        assert getattr(optimizers, name)(parameters()).defaults["lr"] == rate


def test_max_grad_norm_of_the_first_version_clips_each_group():
    ours, theirs = parameters(), parameters()
    groups = [[{"params": [param]} for param in params] for params in (ours, theirs)]
    optimizer = optimizers.FusedAdam(groups[0], lr=0.1, max_grad_norm=0.5)
    peer = torch.optim.AdamW(groups[1], lr=0.1, weight_decay=0)
    for step in range(3):
        for own, peers, grad in zip(ours, theirs, gradients(step), strict=True):
            own.grad, peers.grad = grad.clone(), grad * min(1, 0.5 / (grad.norm().item() + 1e-6))
        optimizer.step(grads=None, scale=1.0)
        peer.step()
    close(ours, theirs)
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)  # it clips unscaled ones


@pytest.mark.parametrize(
    "name, own, peer, options",
    [
        ("Adam", {"adam_w_mode": True}, torch.optim.AdamW, {"weight_decay": 0.3}),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.3}),
        ("SGD", {}, torch.optim.SGD, {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True}),
        ("Adagrad", {}, torch.optim.Adagrad, {"weight_decay": 0.1}),
    ],
)
def test_they_are_torchs(name, own, peer, options):
    kind = getattr(optimizers, f"Fused{name}")
    ours = run(lambda p: kind(p, lr=0.1, **own, **options))
    close(ours, run(lambda p: peer(p, lr=0.1, **options)))


@pytest.mark.parametrize(
    "level, make",
    [
        ("O1", lambda p: optimizers.FusedAdam(p, lr=0.02, bias_correction=False)),
        ("O2", lambda p: optimizers.FusedLAMB(p, lr=0.05)),
        ("O1", lambda p: optimizers.FusedNovoGrad(p, lr=0.3)),
        ("O2", lambda p: optimizers.FusedSGD(p, lr=0.1, wd_after_momentum=True, weight_decay=1e-3)),
        ("O1", lambda p: optimizers.FusedAdagrad(p, lr=0.2, adagrad_w_mode=True)),
        ("O2", lambda p: LARC(torch.optim.SGD(p, lr=0.2, momentum=0.9), 0.1)),
    ],
)
def test_every_optimizer_trains_and_skips_under_amp(amp, level, make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = make(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    x = torch.randn(32, 4)
    y = x.sum(1, keepdim=True).tanh()
    losses = []
    for step in range(40):
        optimizer.zero_grad()
        loss = (model(x).float() - y).pow(2).mean()
        before = [p.detach().clone() for p in model.parameters()]
        with amp.scale_loss(loss * (math.inf if step == 5 else 1.0), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        same = all(map(torch.equal, before, model.parameters()))
        assert same == ampatch.step_was_skipped(optimizer) == (step == 5), step
        losses.append(loss.item())
    assert losses[-1] < 0.4 * losses[0]


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late group"])
def test_an_overflow_is_skipped_where_torchs_fused_kernel_does_not_look(
    amp, corrected, late, monkeypatch
):
    """Fused kernels skip by `found_inf` on the device; our own update must not rely on them."""
    monkeypatch.setattr(common, "can_be_fused", lambda params: True)  # torch's on the CPU can
    model = nn.Linear(2, 2)
    optimizer = optimizers.FusedAdam([model.weight], lr=0.1, bias_correction=corrected or late)
    optimizer.add_param_group({"params": [model.bias], "bias_correction": corrected})
    amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", verbosity=0)
    for factor in (0.01, math.inf):  # 65536 does not fit into FP16
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).float().sum() * factor
        before = [param.detach().clone() for param in model.parameters()]
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        for old, param in zip(before, model.parameters(), strict=True):
            assert torch.equal(old, param) == (factor == math.inf)
            assert bool(param.isfinite().all())


def test_hooks_of_a_step_run_once_and_closures_too():
    for name in ("FusedAdam", "FusedSGD", "FusedAdagrad", "FusedLAMB"):
        seen = []
        optimizer = getattr(optimizers, name)(parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *args, seen=seen: seen.append("before"))
        optimizer.register_step_post_hook(lambda *args, seen=seen: seen.append("after"))
        assert optimizer.step(lambda seen=seen: seen.append("closure") or 7.0) == 7.0
        assert seen == ["before", "closure", "after"], name


def test_zero_grad_as_apex_has_it():
    for optimizer, expected in (
        (optimizers.FusedAdam(parameters()), type(None)),
        (optimizers.FusedAdam(parameters(), set_grad_none=False), torch.Tensor),
        (optimizers.FusedSGD(parameters()), torch.Tensor),
    ):
        param = optimizer.param_groups[0]["params"][0]
        param.grad = torch.ones_like(param)
        optimizer.zero_grad()
        assert isinstance(param.grad, expected)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: optimizers.FusedAdam(parameters(), amsgrad=True), "without amsgrad"),
        (lambda: optimizers.FusedAdam(parameters(), eps_inside_sqrt=True), "eps_inside_sqrt"),
        (lambda: optimizers.FusedAdam(parameters()).step(grads=[]), "scale_loss"),
        (lambda: optimizers.FusedAdam(parameters()).step(grads=None, scale=2.0), "scale_loss"),
        (lambda: optimizers.FusedLAMB(parameters(), amsgrad=True), "without amsgrad"),
        (lambda: optimizers.FusedNovoGrad(parameters(), norm_type=3), "largest value"),
    ],
)
def test_what_is_not_available_is_refused_with_a_replacement(call, words):
    with pytest.raises(RuntimeError, match=re.escape(words)):
        call()


@pytest.mark.parametrize("name", ["FusedAdam", "FusedAdagrad", "FusedLAMB", "FusedNovoGrad"])
def test_apexs_checkpoints_load(name):
    def make(params):
        return getattr(optimizers, name)(params, lr=0.05, weight_decay=0.1)

    def advance(optimizer, params, steps):
        for step in steps:
            for param, grad in zip(params, gradients(step), strict=True):
                param.grad = grad.clone()
            optimizer.step()

    params = parameters()
    optimizer = make(params)
    advance(optimizer, params, range(3))
    saved = as_apex_saves(optimizer.state_dict(), steps=3)
    if name == "FusedNovoGrad":  # apex: norms of half tensors, norms of FP32 tensors
        norms = torch.stack([entry.pop("exp_avg_sq") for entry in saved["state"].values()])
        saved["param_groups"][0]["exp_avg_sq"] = [torch.empty(0), norms]
    before = copy.deepcopy(saved)
    again = [nn.Parameter(param.detach().clone()) for param in params]
    resumed = make(again)
    resumed.load_state_dict(saved)
    assert str(saved) == str(before)  # the caller's dict is left alone
    advance(optimizer, params, range(3, 6))
    advance(resumed, again, range(3, 6))
    assert all(map(torch.equal, params, again))


def test_novograd_refuses_norms_it_cannot_place():
    optimizer = optimizers.FusedNovoGrad(parameters())
    saved = optimizer.state_dict()
    saved["param_groups"][0]["exp_avg_sq"] = [torch.ones(1), torch.ones(2)]
    with pytest.raises(ValueError, match="running norms"):
        optimizer.load_state_dict(saved)


def test_the_lamb_for_mixed_precision_is_lamb_of_fp32_parameters():
    from apex.optimizers import FusedMixedPrecisionLamb

    options = {"lr": 0.05, "weight_decay": 0.1, "max_grad_norm": 2.0}
    ours = run(lambda p: FusedMixedPrecisionLamb(p, **options, reduced_precision_dtype=torch.half))
    close(ours, run(lambda p: optimizers.FusedLAMB(p, **options)))
    later = FusedMixedPrecisionLamb(parameters(), 0.05, 7)
    assert later.param_groups[0]["step"] == 7
    with pytest.raises(RuntimeError, match="half parameters.*Use FP32 parameters, and amp.init"):
        FusedMixedPrecisionLamb(nn.Linear(2, 2).half().parameters())


# Formulas, in float64


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
