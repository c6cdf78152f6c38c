"""apex.fp16_utils: half models and master weights by hand, against plain FP32 training."""

import contextlib
import importlib
import io
import pickle

import pytest
import torch
from torch import nn

import ampatch
from ampatch.compat.apex import fp16_utils
from ampatch.compat.apex.fp16_utils import FP16_Optimizer, network_to_half


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1, keepdim=True)


def loss_of(model: nn.Module) -> torch.Tensor:
    x, y = data()
    return (model(x).float() - y).pow(2).mean()


def close_to_fp32(weights) -> bool:
    """After 15 steps."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(15):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    expected = list(model.parameters())
    moved = [(a - b).norm() for a, b in zip(expected, network().parameters(), strict=True)]
    gap = [(a - b).norm() for a, b in zip(weights, expected, strict=True)]
    return sum(gap) < 0.02 * sum(moved)


def test_star_import_gives_what_old_examples_use():
    scope: dict = {}
    exec("from apex.fp16_utils import *", scope)
    names = "to_python_float network_to_half FP16_Optimizer prep_param_lists tofp16 clip_grad_norm"
    names += " model_grads_to_master_grads master_params_to_model_params BN_convert_float"
    assert {*names.split(), "LossScaler", "DynamicLossScaler"} <= scope.keys()
    assert scope["to_python_float"](torch.tensor([2.5])) == 2.5
    assert scope["to_python_float"]([1.5]) == 1.5


def test_conversions_keep_batch_norms_in_fp32():
    model = network()
    half = network_to_half(model)
    assert model[0].weight.dtype is torch.float16 and half[1] is model
    assert model[1].weight.dtype is model[1].running_mean.dtype is torch.float32
    assert half(data()[0]).dtype is torch.float16

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4))
    model.register_buffer("count", torch.zeros(1, dtype=torch.int64))
    wrapped = fp16_utils.FP16Model(model)
    assert model[1].running_mean.dtype is torch.float16  # nothing to keep without weights
    assert model[2].weight.dtype is torch.float32 and model.count.dtype is torch.int64
    assert fp16_utils.FP16Model(nn.Linear(4, 4))(data()[0]).dtype is torch.float16
    fp16_utils.convert_network(wrapped, torch.float64)
    assert model[0].weight.dtype is torch.float64 and model[2].weight.dtype is torch.float32


@pytest.mark.parametrize("flat", [False, True])
def test_master_weights_by_hand(flat):
    model = network().half()
    params, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
    assert all(master.dtype is torch.float32 for master in masters)
    assert len(masters) == (1 if flat else len(params))
    optimizer = torch.optim.SGD(masters, lr=0.05, momentum=0.9)
    scale = 128.0
    for _ in range(15):
        model.zero_grad()
        x, y = data()
        ((model(x.half()).float() - y).pow(2).mean() * scale).backward()
        fp16_utils.model_grads_to_master_grads(params, masters, flat_master=flat)
        for master in masters:
            master.grad.div_(scale)
        optimizer.step()
        fp16_utils.master_params_to_model_params(params, masters, flat_master=flat)
    assert close_to_fp32([param.float() for param in params])
    with pytest.raises(TypeError, match="flat_master=False"):
        fp16_utils.prep_param_lists(network_to_half(network()), flat_master=True)


def fp16_optimizer(model: nn.Module, verbose=False, **options):
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return FP16_Optimizer(inner, verbose=verbose, **options)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("options", [{"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}])
def test_fp16_optimizer_trains_as_fp32_does(options, parts, capsys):
    model = network_to_half(network())
    optimizer = fp16_optimizer(model, verbose=True, **options)
    done = tried = 0
    while done < 15 and (tried := tried + 1) < 40:
        optimizer.zero_grad(set_grads_to_None=parts == 2)
        for _ in range(parts):
            optimizer.backward(loss_of(model) / parts, update_master_grads=parts == 1)
        if parts == 2:
            optimizer.update_master_grads()
        optimizer.clip_master_grads(1e6)
        before = model[1][0].weight.clone()
        optimizer.step()
        done += not optimizer.overflow
        assert torch.equal(before, model[1][0].weight) == optimizer.overflow
        said = f"The loss scale is {optimizer.loss_scale} now." if optimizer.overflow else ""
        assert said in capsys.readouterr().out
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    assert {p.dtype for p in masters} == {torch.float32}
    assert close_to_fp32(masters)
    assert optimizer.loss_scale < 2.0**16 or not optimizer.dynamic_loss_scale


def test_fp16_optimizer_shows_the_gradients_of_its_fp32_copies():
    model = network_to_half(network())
    weights, rest = [model[1][0].weight, model[1][0].bias], [*model[1][1:].parameters()]
    groups = [{"params": weights}, {"params": rest}]
    optimizer = FP16_Optimizer(torch.optim.SGD(groups, lr=0.1), static_loss_scale=8.0)
    assert optimizer.inspect_master_grad_data() == [[None, None], [None] * len(rest)]
    optimizer.backward(loss_of(model))
    shown = optimizer.inspect_master_grad_data()
    for grads, params in zip(shown, (weights, rest), strict=True):
        scales = [8 if param.dtype is torch.half else 1 for param in params]
        expected = [param.grad.float() / scale for param, scale in zip(params, scales, strict=True)]
        torch.testing.assert_close(grads, expected)
        assert not any(grad.requires_grad for grad in grads)
    shown[0][0].zero_()  # the values themselves, as in apex
    assert not optimizer.param_groups[0]["params"][0].grad.any()


def test_an_overflow_lowers_the_scale_in_backward_and_leaves_gradients():
    """As in apex's last version: scripts divide these gradients, and step only if all is well."""
    model = network_to_half(network())
    optimizer = fp16_optimizer(model, dynamic_loss_scale=True)
    assert optimizer.loss_scale == 2.0**16
    optimizer.backward(loss_of(model) * float("inf"))
    assert optimizer.overflow and optimizer.loss_scale == optimizer.cur_scale == 2.0**15
    assert optimizer.inspect_master_grad_data() is None
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad /= 2
            assert not param.grad.isfinite().all()
    before = model[1][0].weight.clone()
    optimizer.step()
    assert torch.equal(before, model[1][0].weight) and optimizer.loss_scale == 2.0**15
    optimizer.zero_grad()
    optimizer.backward(loss_of(model), update_master_grads=False)
    assert optimizer.loss_scale == 2.0**15  # no look yet
    optimizer.update_master_grads()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_checkpoint_with_the_scaler_of_an_older_apex(dynamic):
    """It holds the object itself, pickled by the name of its class and by attributes."""
    pickled = (
        b"ccopyreg\n_reconstructor\n(capex.fp16_utils.loss_scaler\nDynamicLossScaler\n"
        b"c__builtin__\nobject\nNtR(dVcur_scale\nF4096.0\nsVcur_iter\nI6\ns"
        b"Vlast_overflow_iter\nI2\nsVscale_factor\nF2.0\nsVscale_window\nI5\nsb."
    )
    model = network_to_half(network())
    old = pickle.loads(pickled) if dynamic else fp16_utils.LossScaler(64.0)
    state = fp16_optimizer(model).state_dict() | {"loss_scaler": old, "dynamic_loss_scale": dynamic}
    resumed = fp16_optimizer(model, dynamic_loss_scale=dynamic)
    resumed.load_state_dict(state)
    for expected in (4096.0, 4096.0, 8192.0) if dynamic else (64.0,) * 3:  # 7 - 2 is the window
        assert resumed.loss_scale == old.loss_scale == expected
        old.update_scale(overflow=False)
        resumed.loss_scaler.clear_overflow_state()
        resumed.loss_scaler.update_scale()


def test_fp16_optimizer_refuses_closures():
    with pytest.raises(ampatch.AmpatchError, match=r"step\(closure\).*ampatch.initialize"):
        fp16_optimizer(network().half()).step(lambda: None)


def test_late_half_weights_get_fp32_copies():
    first, late = nn.Linear(4, 1).half(), nn.Linear(4, 1).half()
    optimizer = fp16_optimizer(first, static_loss_scale=128.0)
    optimizer.add_param_group({"params": list(late.parameters())})
    expected = late.weight.detach().float()
    optimizer.backward(late(torch.ones(1, 4).half()).float().sum())  # gradients of 1
    optimizer.step()
    [master, _] = optimizer.param_groups[1]["params"]
    assert torch.equal(master, expected - 0.05) and torch.equal(late.weight, master.half())


def test_fp16_optimizer_resumes_from_a_checkpoint_exactly():
    def steps(model, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            optimizer.backward(loss_of(model))
            optimizer.step()

    model = network_to_half(network())
    optimizer = fp16_optimizer(
        model, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**12, "scale_window": 3}
    )
    steps(model, optimizer, 5)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    steps(model, optimizer, 5)

    file.seek(0)
    weights, state = torch.load(file, weights_only=False)
    again = network_to_half(network())
    resumed = fp16_optimizer(again)
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    steps(again, resumed, 5)

    assert all(map(torch.equal, model.parameters(), again.parameters()))
    assert resumed.loss_scale == optimizer.loss_scale != 2.0**12
    other = fp16_optimizer(nn.Linear(3, 3).half())
    with pytest.raises(ValueError, match="fp32_from_fp16"):
        other.load_state_dict(state)


def test_the_dynamic_rule():
    scaler = fp16_utils.DynamicLossScaler(init_scale=8, scale_factor=2, scale_window=3)
    scales = []
    for overflow in (False, False, False, True, True, False, False, False, True, True, True, True):
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == [8, 8, 16, 8, 4, 4, 4, 8, 4, 2, 1, 1]
    param = nn.Parameter(torch.ones(2))
    assert not scaler.has_overflow([param])
    param.grad = torch.tensor([1.0, float("nan")])
    assert scaler.has_overflow([param])


def test_state_of_a_used_optimizer_moves_to_the_masters():
    model = network().half()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (model(data()[0].half()).float() ** 2).mean().backward()
    inner.step()
    before = [inner.state[p]["momentum_buffer"].float() for p in model.parameters()]
    wrapped = FP16_Optimizer(inner)
    for master, value in zip(wrapped.param_groups[0]["params"], before, strict=True):
        now = wrapped.state[master]["momentum_buffer"]
        assert now.dtype is torch.float32 and torch.equal(now, value)


@pytest.mark.parametrize("place", ["fp16_utils", "optimizers", "contrib.optimizers"])
@pytest.mark.parametrize("scale", [0, 0.0, None, -1, 128.0])
def test_a_dynamic_scale_does_not_look_at_the_static_one(place, scale):
    """Scripts with "0 means dynamic" pass both."""
    kind = importlib.import_module(f"apex.{place}").FP16_Optimizer
    for arguments in ((scale, True), (scale, True, {"init_scale": 2.0**16})):
        optimizer = kind(torch.optim.SGD(nn.Linear(2, 2).half().parameters(), lr=0.1), *arguments)
        assert optimizer.loss_scale == 2.0**16 and optimizer.loss_scaler.dynamic
    with pytest.raises((TypeError, ValueError)) if scale != 128.0 else contextlib.nullcontext():
        kind(torch.optim.SGD(nn.Linear(2, 2).half().parameters(), lr=0.1), static_loss_scale=scale)
