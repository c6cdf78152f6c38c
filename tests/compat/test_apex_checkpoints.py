"""Checkpoints in apex's layouts load; the reference is a plain FP32 loop that wrote them so."""

import copy

import pytest
import torch
import torch.nn.functional as F
from small_training import backward, data, seeded
from torch import nn

import ampatch
from ampatch.compat.apex.optimizers import FusedSGD
from ampatch.compat.apex.parallel import convert_syncbn_model

BF16 = torch.bfloat16
BETAS, LR, EPS = (0.9, 0.95), 0.01, 1e-6


def adamw(model, **options):
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, weight_decay=0.1, **options)


@pytest.fixture
def trained():
    """Weights and AdamW state after three FP32 steps, as torch saves them."""
    model = seeded()
    optimizer = adamw(model)
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = data(step)
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model, optimizer.state_dict()


def in_fused_layout(state):
    """As `apex.optimizers.FusedAdam` saves: the step count is the group's, not the parameter's."""
    options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": 0.1, "bias_correction": True}
    groups = [{**options, "step": 3, "params": group["params"]} for group in state["param_groups"]]
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


LAYOUTS = {
    "O2": lambda _, state: state,
    "fused": lambda _, state: in_fused_layout(state),
    "fp32_from_fp16": in_fp16_optimizer_layout,
}


def entries(optimizer):
    state = optimizer.state_dict()["state"]
    return [torch.as_tensor(state[i][k]).clone() for i in sorted(state) for k in sorted(state[i])]


def resume(level, fused=False):
    model = seeded(7)
    optimizer = adamw(model, fused=fused)
    ampatch.initialize(model, optimizer, opt_level=level, dtype=BF16, verbosity=0)
    return model, optimizer


@pytest.mark.parametrize(
    ("layout", "fused", "opt_level"),
    [
        *((layout, False, "O2") for layout in LAYOUTS),
        *((layout, False, "O3") for layout in LAYOUTS),  # to weights in half
        ("fused", True, "O2"),
    ],
)
def test_an_optimizers_state_loads(trained, layout, fused, opt_level):
    """Bit for bit the values that were saved; the step count goes on; the method is given back."""
    model, state = trained
    saved = LAYOUTS[layout](model, copy.deepcopy(state))
    halves = copy.deepcopy(model).half().state_dict()  # early apex saved the model so
    resumed, optimizer = resume(opt_level, fused)
    resumed.load_state_dict(halves)
    optimizer.load_state_dict(state_dict=saved)
    reference = adamw(seeded())
    reference.load_state_dict(state)
    kept = BF16 if opt_level == "O3" else torch.float32
    for entry, expected in zip(entries(optimizer), entries(reference), strict=True):
        assert torch.equal(entry, expected if expected.dim() == 0 else expected.to(kept))
    truth = model.state_dict() if layout.startswith("fp32") else halves
    for master, name in zip(ampatch.master_params(optimizer), truth, strict=True):
        assert torch.equal(master, truth[name].float().to(kept)), name
        assert torch.equal(resumed.get_parameter(name), master.to(resumed[0].weight.dtype))
    if layout == "fused":
        assert {group["fused"] for group in optimizer.param_groups} == {fused}
    backward(resumed, optimizer, data(5))
    optimizer.step()
    counts = {float(optimizer.state[p]["step"]) for p in ampatch.master_params(optimizer)}
    assert counts == {4.0}
    ampatch.deactivate()
    assert "load_state_dict" not in vars(optimizer)


def test_masters_that_were_fewer_than_parameters():
    """apex listed the masters of half parameters only; norms were FP32 in the model."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level="O2", verbosity=0)
    masters = [torch.full((4, 3), 0.1), torch.full((4,), 0.3)]
    inner = optimizer.state_dict()
    optimizer.load_state_dict({"optimizer_state_dict": inner, "fp32_from_fp16": [masters]})
    loaded = list(ampatch.master_params(optimizer))
    assert torch.equal(loaded[0], masters[0]) and torch.equal(loaded[1], masters[1])
    assert loaded[0] is model[0].weight and torch.equal(model[1].weight, torch.ones(4))


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"fp32_from_fp16": [[torch.ones(8, 4)], []]}, "has shapes"),
        ({"fp32_from_fp16": []}, "has 0 groups, this optimizer has 2"),
        ({"fp32_groups_flat": [torch.ones(40), torch.ones(18)]}, "start the optimizer anew"),
    ],
)
def test_masters_that_do_not_fit_are_refused_and_nothing_changes(trained, wrong, words):
    model, optimizer = resume("O2")
    before = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(ValueError, match=f"optimizer.load_state_dict.*{words}"):
        optimizer.load_state_dict({"optimizer_state_dict": trained[1], **wrong})
    assert not optimizer.state
    assert all(map(torch.equal, before, model.state_dict().values()))


@pytest.mark.parametrize(
    ("half", "settings"),
    [
        (torch.float16, {"opt_level": "O1"}),
        (torch.float16, {"opt_level": "O2"}),
        (BF16, {"opt_level": "O2", "keep_batchnorm_fp32": "False", "loss_scale": "128.0"}),
    ],
)
def test_resuming_by_lazy_init_is_exact(amp, half, settings, monkeypatch):
    """As apex's imagenet example and Megatron do it; settings may be strings."""
    monkeypatch.setenv("AMPATCH_DTYPE", str(half).removeprefix("torch."))
    dtypes = set()

    def begin():
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
        model = convert_syncbn_model(nn.Sequential(*layers))
        model[0].register_forward_hook(lambda layer, args, output: dtypes.add(output.dtype))
        optimizer = FusedSGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        return amp.initialize(model, optimizer, verbosity=0, **settings)

    def train(steps):
        losses = []
        for step in steps:
            x = torch.randn(16, 3, 6, 6, generator=torch.Generator().manual_seed(step % 3))
            loss = F.cross_entropy(model(x), (x.mean((1, 2, 3)) * 10).long().clamp(0, 3))
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = begin()
    first = train(range(15))
    masters = list(amp.master_params(optimizer))
    states = model.state_dict(), optimizer.state_dict(), amp.state_dict(), masters
    of_model, of_optimizer, of_amp, masters = copy.deepcopy(states)
    last = train(range(15, 30))
    expected = [param.detach().clone() for param in amp.master_params(optimizer)]
    assert sum(last[-6:]) < 0.4 * sum(first[:6])

    model, optimizer = begin()
    model.load_state_dict(of_model)
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(of_optimizer)
    for param, saved in zip(amp.master_params(optimizer), masters, strict=True):
        param.data.copy_(saved.data)
    amp.load_state_dict(of_amp)
    assert train(range(15, 30)) == last
    assert all(map(torch.equal, amp.master_params(optimizer), expected))
    assert dtypes == {half} and not optimizer._amp_stash.all_fp16_params
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert "loss_scale" not in settings or ampatch.loss_scale() == 128.0
