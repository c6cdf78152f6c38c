"""apex.optimizers and LARC against torch's optimizers and against formulas written out here."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import ampatch
from ampatch.compat import apex as compat


@pytest.fixture(autouse=True)
def apex_package():
    compat.install()
    yield
    compat.uninstall()


START = [torch.linspace(-1, 1, 6).reshape(2, 3), torch.tensor([0.5, -2.0]), torch.zeros(3)]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(value.clone()) for value in START]


def gradients(step: int) -> list[torch.Tensor]:
    data = torch.Generator().manual_seed(step)
    return [torch.randn(value.shape, generator=data) * 3 for value in START]


def run(make, steps: int = 4) -> list[torch.Tensor]:
    """The parameters after some steps of the optimizer that `make(parameters)` gives."""
    params = parameters()
    optimizer = make(params)
    for step in range(steps):
        for param, grad in zip(params, gradients(step), strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return [param.detach() for param in params]


def close(ours, theirs) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), atol=1e-6, rtol=1e-5)


# Against torch


def test_defaults_are_those_of_apex():
    from apex import optimizers

    adam = optimizers.FusedAdam(parameters()).defaults
    assert (adam["lr"], adam["betas"], adam["eps"]) == (1e-3, (0.9, 0.999), 1e-8)
    assert adam["weight_decay"] == 0.0 and adam["bias_correction"] is True
    lamb = optimizers.FusedLAMB(parameters()).defaults
    assert (lamb["eps"], lamb["weight_decay"], lamb["max_grad_norm"]) == (1e-6, 0.01, 1.0)
    novograd = optimizers.FusedNovoGrad(parameters()).defaults
    assert (novograd["eps"], novograd["norm_type"], novograd["init_zero"]) == (1e-8, 2, False)
    adagrad = optimizers.FusedAdagrad(parameters()).defaults
    assert (adagrad["lr"], adagrad["eps"]) == (1e-2, 1e-10)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("old_torch", [False, True])
def test_adam_is_adamw_or_adam(mode, old_torch, monkeypatch):
    from apex.optimizers import FusedAdam

    from ampatch.compat.apex.optimizers import adam

    if old_torch:  # whose Adam knows no decoupled weight decay
        monkeypatch.setattr(adam, "_DECOUPLES", False)
    peer = torch.optim.AdamW if mode else torch.optim.Adam
    ours = run(lambda p: FusedAdam(p, lr=0.1, weight_decay=0.3, adam_w_mode=mode))
    close(ours, run(lambda p: peer(p, lr=0.1, weight_decay=0.3)))


def test_sgd_and_adagrad_are_torchs():
    from apex.optimizers import FusedAdagrad, FusedSGD

    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
    close(run(lambda p: FusedSGD(p, **options)), run(lambda p: torch.optim.SGD(p, **options)))
    options = {"lr": 0.1, "weight_decay": 0.1}
    close(
        run(lambda p: FusedAdagrad(p, **options)), run(lambda p: torch.optim.Adagrad(p, **options))
    )


# Against formulas, in float64


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
    from apex.optimizers import FusedAdam

    options = {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": mode}
    ours = run(lambda p: FusedAdam(p, bias_correction=False, **options))
    close(ours, adam_formula(4, 0.01, 0.1, mode))
    corrected = run(lambda p: FusedAdam(p, **options))
    assert not torch.allclose(ours[0], corrected[0], atol=1e-3)  # the option does something


def test_bias_correction_group_by_group():
    from apex.optimizers import FusedAdam

    def make(params):
        return FusedAdam(
            [{"params": params[:1], "bias_correction": False}, {"params": params[1:]}], lr=0.01
        )

    ours = run(make)
    close(ours[:1], adam_formula(4, 0.01, 0, True)[:1])
    close(ours[1:], run(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0))[1:])


def test_sgd_with_weight_decay_after_momentum():
    from apex.optimizers import FusedSGD

    ours = run(
        lambda p: FusedSGD(p, lr=0.1, momentum=0.9, weight_decay=0.2, wd_after_momentum=True)
    )
    params = [value.double() for value in START]
    velocity = [torch.zeros_like(p) for p in params]
    for step in range(4):
        for i, grad in enumerate(gradients(step)):
            velocity[i] = 0.9 * velocity[i] + grad.double()
            params[i] = params[i] - 0.1 * (velocity[i] + 0.2 * params[i])
    close(ours, params)


def test_adagrad_with_decoupled_weight_decay():
    from apex.optimizers import FusedAdagrad

    ours = run(lambda p: FusedAdagrad(p, lr=0.1, weight_decay=0.2, adagrad_w_mode=True))
    params = [value.double() for value in START]
    total = [torch.zeros_like(p) for p in params]
    for step in range(4):
        for i, grad in enumerate(gradients(step)):
            total[i] = total[i] + grad.double() ** 2
            update = grad.double() / (total[i].sqrt() + 1e-10) + 0.2 * params[i]
            params[i] = params[i] - 0.1 * update
    close(ours, params)


def lamb_formula(lr, decay, adam_w, averaging, corrected, limit, nvlamb):
    beta1, beta2, eps = 0.9, 0.999, 1e-6
    params = [value.double() for value in START]
    first = [torch.zeros_like(p) for p in params]
    second = [torch.zeros_like(p) for p in params]
    for step in range(1, 5):
        grads = [grad.double() for grad in gradients(step - 1)]
        norm = math.sqrt(sum(float((grad * grad).sum()) for grad in grads))
        if limit and norm > limit:
            grads = [grad * (limit / norm) for grad in grads]
        for i, grad in enumerate(grads):
            if not adam_w:
                grad = grad + decay * params[i]
            first[i] = beta1 * first[i] + (1 - beta1 if averaging else 1) * grad
            second[i] = beta2 * second[i] + (1 - beta2) * grad * grad
            m = first[i] / (1 - beta1**step if corrected else 1)
            v = second[i] / (1 - beta2**step if corrected else 1)
            update = m / (v.sqrt() + eps) + (decay * params[i] if adam_w else 0)
            ratio, size, length = 1.0, float(params[i].norm()), float(update.norm())
            if (decay or nvlamb) and size > 0 and length > 0:
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
    from apex.optimizers import FusedLAMB

    ours = run(lambda p: FusedLAMB(p, lr=0.05, **options))
    close(
        ours,
        lamb_formula(
            0.05,
            options.get("weight_decay", 0.01),
            options.get("adam_w_mode", True),
            options.get("grad_averaging", True),
            options.get("bias_correction", True),
            options.get("max_grad_norm", 1.0),
            options.get("use_nvlamb", False),
        ),
    )


def novograd_formula(lr, decay, inside, averaging, infinite, init_zero, corrected):
    beta1, beta2, eps = 0.95, 0.98, 1e-8
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
            v = norms[i] / (math.sqrt(1 - beta2**step) if corrected else 1) + eps
            share = 1 - beta1 if averaging else 1
            correction = 1 - beta1**step if corrected else 1
            if inside:
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
    from apex.optimizers import FusedNovoGrad

    ours = run(lambda p: FusedNovoGrad(p, lr=0.05, betas=(0.95, 0.98), weight_decay=0.1, **options))
    close(
        ours,
        novograd_formula(
            0.05,
            0.1,
            options.get("reg_inside_moment", False),
            options.get("grad_averaging", True),
            options.get("norm_type", 2) == 0,
            options.get("init_zero", False),
            options.get("bias_correction", True),
        ),
    )


@pytest.mark.parametrize("clip", [True, False])
def test_larc(clip):
    from apex.parallel import LARC as by_module
    from apex.parallel.LARC import LARC

    lr, decay, trust = 0.4, 0.1, 0.05
    made = []

    def make(params):
        made.append(LARC(torch.optim.SGD(params, lr=lr, weight_decay=decay), trust, clip))
        return made[0]

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
    assert made[0].param_groups[0]["weight_decay"] == decay
    assert isinstance(by_module(torch.optim.SGD(parameters(), lr=0.1)), LARC)


def test_larc_gives_the_weight_decay_back_after_an_exception():
    from apex.parallel.LARC import LARC

    inner = torch.optim.SGD(parameters(), lr=0.1, weight_decay=0.3)
    inner.register_step_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LARC(inner).step()
    assert inner.param_groups[0]["weight_decay"] == 0.3


# Under amp


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ["adam", "lamb", "novograd", "sgd", "adagrad", "larc"])
def test_every_optimizer_trains_and_skips_under_amp(name, level):
    from apex import amp, optimizers
    from apex.parallel.LARC import LARC

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = {
        "adam": lambda p: optimizers.FusedAdam(p, lr=0.02, bias_correction=False),
        "lamb": lambda p: optimizers.FusedLAMB(p, lr=0.05),
        "novograd": lambda p: optimizers.FusedNovoGrad(p, lr=0.3),
        "sgd": lambda p: optimizers.FusedSGD(p, lr=0.1, wd_after_momentum=True, weight_decay=1e-3),
        "adagrad": lambda p: optimizers.FusedAdagrad(p, lr=0.2, adagrad_w_mode=True),
        "larc": lambda p: LARC(torch.optim.SGD(p, lr=0.2, momentum=0.9), 0.1),
    }[name](model.parameters())
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
    corrected, late, monkeypatch
):
    """Fused kernels skip by `found_inf` on the device; our own update must not rely on them."""
    from apex import amp
    from apex.optimizers import FusedAdam

    from ampatch.compat.apex.optimizers import adam

    monkeypatch.setattr(adam, "all_on_cuda", lambda params: True)  # torch has them on the CPU too
    model = nn.Linear(2, 2)
    optimizer = FusedAdam([model.weight], lr=0.1, bias_correction=corrected or late)
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
    from apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedSGD

    for kind in (FusedAdam, FusedSGD, FusedAdagrad, FusedLAMB):
        seen = []
        optimizer = kind(parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *args: seen.append("before"))
        optimizer.register_step_post_hook(lambda *args: seen.append("after"))
        assert optimizer.step(lambda: seen.append("closure") or 7.0) == 7.0
        assert seen == ["before", "closure", "after"], kind


def test_zero_grad_as_apex_has_it():
    from apex.optimizers import FusedAdam, FusedSGD

    for optimizer, expected in (
        (FusedAdam(parameters()), type(None)),
        (FusedAdam(parameters(), set_grad_none=False), torch.Tensor),
        (FusedSGD(parameters()), torch.Tensor),
    ):
        param = optimizer.param_groups[0]["params"][0]
        param.grad = torch.ones_like(param)
        optimizer.zero_grad()
        assert isinstance(param.grad, expected)


# Old ways


def test_the_first_versions_arguments_of_step():
    from apex.optimizers import FusedAdam

    params, scale = parameters(), 128.0
    optimizer = FusedAdam(params, lr=0.1)
    halves = [param.detach().half() for param in params]
    for step in range(4):
        grads = [(grad * scale).half() for grad in gradients(step)]
        optimizer.step(grads=grads, output_params=halves, scale=scale)
    for ours, theirs in zip(params, run(lambda p: torch.optim.Adam(p, lr=0.1)), strict=True):
        torch.testing.assert_close(ours.detach(), theirs, atol=1e-3, rtol=1e-3)
    assert all(map(torch.equal, halves, [param.detach().half() for param in params]))
    with pytest.raises(RuntimeError, match="scale_loss"):
        optimizer.step(scale=2.0)
    with pytest.raises(ValueError, match="grads"):
        optimizer.step(grads=halves[:1])


def test_max_grad_norm_of_the_first_version():
    from apex.optimizers import FusedAdam

    params = parameters()
    optimizer = FusedAdam(params, lr=0.1, max_grad_norm=1.0, betas=(0.0, 0.5))
    grads = gradients(0)
    norm = torch.cat([grad.reshape(-1) for grad in grads]).norm()
    optimizer.step(grads=[grad * 8 for grad in grads], scale=8.0, grad_norms=[norm * 8])
    first = optimizer.state[params[0]]["exp_avg"]
    torch.testing.assert_close(first, grads[0] / norm, atol=1e-5, rtol=1e-4)


def old_checkpoint(optimizer, names: tuple[str, ...]) -> dict:
    """What apex would have saved: steps counted in the group, only its own options."""
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        for name in set(group) - {"params", *names}:
            del group[name]
        group["step"] = 3
    for entry in saved["state"].values():
        entry.pop("step", None)
    return saved


@pytest.mark.parametrize("name", ["FusedAdam", "FusedAdagrad", "FusedLAMB", "FusedNovoGrad"])
def test_apexs_checkpoints_load(name):
    from apex import optimizers

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
    options = ("lr", "bias_correction", "betas", "eps", "weight_decay", "grad_averaging",
               "max_grad_norm", "norm_type", "init_zero")  # fmt: skip
    saved = old_checkpoint(optimizer, options)
    if name == "FusedNovoGrad":  # apex: norms of half tensors, norms of FP32 tensors
        norms = torch.stack([entry.pop("exp_avg_sq") for entry in saved["state"].values()])
        saved["param_groups"][0]["exp_avg_sq"] = [torch.empty(0), norms]
    found = copy.deepcopy(saved)
    again = [nn.Parameter(param.detach().clone()) for param in params]
    resumed = make(again)
    resumed.load_state_dict(saved)
    assert str(saved) == str(found)  # the caller's dict is left alone
    advance(optimizer, params, range(3, 6))
    advance(resumed, again, range(3, 6))
    assert all(map(torch.equal, params, again))


def test_novograd_refuses_norms_it_cannot_place():
    from apex.optimizers import FusedNovoGrad

    optimizer = FusedNovoGrad(parameters())
    saved = optimizer.state_dict()
    saved["param_groups"][0]["exp_avg_sq"] = [torch.ones(1), torch.ones(2)]
    with pytest.raises(ValueError, match="running norms"):
        optimizer.load_state_dict(saved)
