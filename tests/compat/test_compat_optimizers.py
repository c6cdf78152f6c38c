"""apex.optimizers against torch's."""

import copy
import math
import re

import pytest
import torch
from apex_optimizers import as_apex_saves, close, gradients, parameters, run
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
