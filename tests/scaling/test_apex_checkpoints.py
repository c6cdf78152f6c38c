"""Checkpoints in apex's layouts load; the reference is a plain FP32 loop that wrote them so."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch

BF16 = torch.bfloat16
BETAS, LR, EPS = (0.9, 0.95), 0.01, 1e-6


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def adamw(model, **options):
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, weight_decay=0.1, **options)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)


@pytest.fixture
def trained():
    """Weights and AdamW state after three FP32 steps, as torch saves them."""
    model = build()
    optimizer = adamw(model)
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model, optimizer.state_dict()


def in_fused_layout(state):
    """As `apex.optimizers.FusedAdam` saves: the step count is the group's, not the parameter's."""
    groups = [
        {
            "lr": LR,
            "bias_correction": True,
            "betas": BETAS,
            "eps": EPS,
            "weight_decay": 0.1,
            "step": 3,
            "params": group["params"],
        }
        for group in state["param_groups"]
    ]
    entries = {
        key: {name: entry[name] for name in ("exp_avg", "exp_avg_sq")}
        for key, entry in state["state"].items()
    }
    return {"state": entries, "param_groups": groups}


def in_fp16_optimizer_layout(model, state):
    """As `apex.fp16_utils.FP16_Optimizer` saves."""
    masters = [[p.detach().clone() for p in model[index].parameters()] for index in (0, 2)]
    return {
        "dynamic_loss_scale": True,
        "overflow": False,
        "first_closure_call_this_step": True,
        "optimizer_state_dict": state,
        "fp32_from_fp16": masters,
    }


def in_flat_layout(model, state):
    """As the contributed `FP16_Optimizer` around its FusedAdam saves: a flat tensor per group."""

    def flat(tensors):
        return torch.cat([tensor.detach().flatten() for tensor in tensors])

    entries, groups = {}, []
    for number, group in enumerate(state["param_groups"]):
        mine = [state["state"][key] for key in group["params"]]
        entries[number] = {
            "step": 3,
            "exp_avg": flat(entry["exp_avg"] for entry in mine),
            "exp_avg_sq": flat(entry["exp_avg_sq"] for entry in mine),
        }
        groups.append({**group, "params": [number]})
    return {
        "dynamic_loss_scale": True,
        "cur_scale": 65536.0,
        "cur_iter": 3,
        "optimizer_state_dict": {"state": entries, "param_groups": groups},
        "fp32_groups_flat": [flat(model[index].parameters()) for index in (0, 2)],
    }


def with_steps_as_tensors(saved):
    """Newer optimizers count in a tensor, of which a flat group has one."""
    for entry in saved["optimizer_state_dict"]["state"].values():
        entry["step"] = torch.tensor(float(entry["step"]))
    return saved


LAYOUTS = {
    "O2": lambda model, state: state,
    "fused": lambda model, state: in_fused_layout(state),
    "fp32_from_fp16": in_fp16_optimizer_layout,
    "fp32_groups_flat": in_flat_layout,
    "fp32_groups_flat, tensors": lambda *found: with_steps_as_tensors(in_flat_layout(*found)),
}


def entries(optimizer):
    state = optimizer.state_dict()["state"]
    return [torch.as_tensor(state[i][k]).clone() for i in sorted(state) for k in sorted(state[i])]


def resume(level, fused=False):
    model = build(7)
    optimizer = adamw(model, fused=fused)
    ampatch.initialize(model, optimizer, opt_level=level, dtype=BF16, verbosity=0)
    return model, optimizer


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizers_state_loads(trained, layout, fused, opt_level):
    """Bit for bit the values that were saved; the step count goes on."""
    model, state = trained
    saved = LAYOUTS[layout](model, copy.deepcopy(state))
    halves = copy.deepcopy(model).half().state_dict()  # early apex saved the model so
    resumed, optimizer = resume(opt_level, fused)
    resumed.load_state_dict(halves)
    optimizer.load_state_dict(saved)
    reference = adamw(build())
    reference.load_state_dict(state)
    kept = BF16 if opt_level == "O3" else torch.float32
    for found, expected in zip(entries(optimizer), entries(reference), strict=True):
        assert torch.equal(found, expected if expected.dim() == 0 else expected.to(kept))
    truth = model.state_dict() if layout.startswith("fp32") else halves
    for master, name in zip(ampatch.master_params(optimizer), truth, strict=True):
        assert torch.equal(master, truth[name].float().to(kept)), name
        assert torch.equal(resumed.get_parameter(name), master.to(resumed[0].weight.dtype))
    if layout == "fused":
        assert {group["fused"] for group in optimizer.param_groups} == {fused}
    inputs, targets = batch(5)
    with ampatch.scale_loss(F.mse_loss(resumed(inputs).float(), targets), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    counts = {float(optimizer.state[p]["step"]) for p in ampatch.master_params(optimizer)}
    assert counts == {4.0}


def test_the_scalers_state_loads():
    model = build()
    ampatch.initialize(model, adamw(model), num_losses=2, verbosity=0)
    state = {
        "loss_scaler0": {"loss_scale": 4096.0, "unskipped": 1999},
        "loss_scaler1": {"loss_scale": 2.0, "unskipped": 7},
    }
    ampatch.load_state_dict(state)
    assert ampatch.state_dict() == state


def test_masters_that_were_fewer_than_parameters():
    """apex listed the masters of half parameters only; norms were FP32 in the model."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level="O2", verbosity=0)
    masters = [torch.full((4, 3), 0.1), torch.full((4,), 0.3)]
    inner = optimizer.state_dict()
    optimizer.load_state_dict({"optimizer_state_dict": inner, "fp32_from_fp16": [masters]})
    found = list(ampatch.master_params(optimizer))
    assert torch.equal(found[0], masters[0]) and torch.equal(found[1], masters[1])
    assert found[0] is model[0].weight and torch.equal(model[1].weight, torch.ones(4))


@pytest.mark.parametrize(
    "wrong",
    [
        {"fp32_from_fp16": [[torch.ones(8, 4)], []]},
        {"fp32_from_fp16": []},
        {"fp32_groups_flat": [torch.ones(3), torch.ones(18)]},
    ],
)
def test_masters_that_do_not_fit_are_refused_and_nothing_changes(trained, wrong):
    model, optimizer = resume("O2")
    before = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(ValueError, match="optimizer.load_state_dict"):
        optimizer.load_state_dict({"optimizer_state_dict": trained[1], **wrong})
    assert not optimizer.state
    assert all(map(torch.equal, before, model.state_dict().values()))


def test_the_method_keeps_its_signature_and_is_given_back():
    _model, optimizer = resume("O2")
    optimizer.load_state_dict(state_dict=optimizer.state_dict())
    ampatch.deactivate()
    assert "load_state_dict" not in vars(optimizer)
