"""Parameters that are unusual, complex, come late or live elsewhere, and their groups."""

import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from small_training import backward, data, same, seeded, step, train, values
from torch import Tensor, nn

import ampatch


@pytest.mark.parametrize("when", ["in the block", "pending", "before the step"])
def test_add_param_group_in_the_middle_of_a_step(when):
    """Gradients that the new ones have had are zeroed by the script."""
    model, plain = seeded(), seeded()
    optimizer, reference = (
        torch.optim.SGD(m[0].parameters(), lr=0.1, momentum=0.9) for m in (model, plain)
    )

    def add(now):
        if now == when:
            if now != "in the block":
                model[2].zero_grad()  # ampatch has not seen the new ones yet
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})

    ampatch.initialize(model, optimizer, opt_level="O2", verbosity=0)
    loss = F.mse_loss(model(data(1)[0]), data(1)[1])
    with ampatch.scale_loss(loss, optimizer, delay_unscale=True) as scaled:
        add("in the block")
        scaled.backward()
    add("pending")
    backward(model, optimizer, data(2))
    add("before the step")
    optimizer.step()
    train(model, optimizer, data(3))
    reference.add_param_group({"params": list(plain[2].parameters()), "lr": 0.05})
    for seed in (1, 2, 3):
        F.mse_loss(plain(data(seed)[0]), data(seed)[1]).backward()
        if seed <= {"in the block": 0, "pending": 1, "before the step": 2}[when]:
            plain[2].zero_grad()
        if seed > 1:
            reference.step()
            reference.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.01, rtol=0)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_param_groups_keep_their_identity(level):
    """Schedulers, warm-up code and users hold the list, its dicts, their lists and parameters."""
    model = seeded()
    groups = [{"params": list(layer.parameters())} for layer in (model[0], model[2])]
    optimizer = torch.optim.SGD(groups, lr=0.1)

    def held():
        groups = optimizer.param_groups
        lists = [group["params"] for group in groups]
        return [groups, *groups, *lists, *itertools.chain(*lists), optimizer.state]

    before = held()
    for opt_level in (level, "O2"):
        ampatch.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
        train(model, optimizer, data(1))
    ampatch.deactivate()
    assert all(a is b for a, b in zip(before, held(), strict=True))


DIVIDE_BY_ZERO = {
    "Adam": torch.optim.Adam,
    "AdamW, foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
}
FINE = {
    **{f"{name}, eps": functools.partial(kind, eps=1e-3) for name, kind in DIVIDE_BY_ZERO.items()},
    "Adam, fused": functools.partial(torch.optim.Adam, fused=True),  # computes in FP32
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,  # its eps are two
    "SGD": torch.optim.SGD,
}


@pytest.mark.parametrize(
    "kind, level, dtype, is_added",
    [
        *((kind, "O3", torch.float16, False) for kind in (*DIVIDE_BY_ZERO, *FINE)),
        ("Adam", "O3", torch.float16, True),
        ("Adam", "O3", torch.bfloat16, False),
        ("Adam", "O2", torch.float16, False),
    ],
)
def test_an_eps_that_is_zero_in_half_weights_is_named(kind, level, dtype, is_added, caplog):
    """Where a weight whose gradient is 0 becomes NaN, and there only."""
    model = nn.Linear(2, 2, bias=False)
    optimizer = {**DIVIDE_BY_ZERO, **FINE}[kind](model.parameters(), lr=0.01)
    ampatch.initialize(model, None if is_added else optimizer, opt_level=level, dtype=dtype)
    ampatch.add_optimizers(optimizer)
    step(model(torch.zeros(1, 2)).sum(), optimizer)
    expected = kind in DIVIDE_BY_ZERO and (level, dtype) == ("O3", torch.float16)
    assert bool(model.weight.isnan().any()) is expected
    said = [line for line in caplog.messages if "is 0 in torch.float16" in line]
    assert len(said) == expected and all("with eps=0.001, or" in line for line in said)


class CastsItsOwn(nn.Module):
    """A loss with a weight, which it casts to the dtype of what it is given."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, outputs):
        self.w.data = self.w.data.to(outputs.dtype)
        return (outputs * self.w).square().mean()


@pytest.mark.parametrize("level, after", [("O0", 3), ("O1", 0), ("O2", 3), ("O3", 0)])
def test_a_trained_weight_that_is_made_half_is_named_once(level, after, half, caplog):
    """torch.amp.GradScaler refuses its gradient."""
    model, loss = seeded(), CastsItsOwn()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.01)
    ampatch.initialize(model, optimizer, opt_level=level, dtype=half)
    for number in range(after + 8):
        if number == after:
            assert "FP32" not in caplog.text
        step(loss(model(data()[0]).to(torch.float32 if number < after else half)), optimizer)
    (said,) = [line for line in caplog.messages if "FP32" in line]
    expected = f"SGD: param_groups[0]['params'][4], of shape (2,), was FP32 and is {half} now"
    assert said.startswith(expected) and "weight.to(x.dtype)" in said


def test_a_models_own_weight_that_is_made_half_is_named_by_its_path(half, caplog):
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=half)
    model[2].weight.data = model[2].weight.data.to(half)
    train(model, optimizer, data())
    assert "SGD: 2.weight, of shape (2, 8), was FP32" in caplog.text


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_unused_parameters_on_another_device_do_no_harm(level):
    """`meta` stands for it: such parameters have no gradients, and nothing is copied across."""
    model = seeded()
    model.far = nn.Linear(2, 2, device="meta")
    model.forward = lambda inputs: nn.Sequential.forward(model[:3], inputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = values(optimizer)[:4]
    train(model, optimizer, data())
    assert not same(before, values(optimizer)[:4])
    assert model.far.weight.device.type == "meta"
    assert [p.device.type for p in ampatch.master_params(optimizer)] == ["cpu"] * 4 + ["meta"] * 2


# Complex weights, as of spectral layers: torch's kernel takes real numbers


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Parameter(torch.randn(6))
        self.modes = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.lazy = nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float() + self.bias
        x = torch.fft.irfft(torch.fft.rfft(x) * self.modes, n=6)
        return (x * self.lazy.conj()).abs()  # the gradient of `lazy` is conjugated lazily


def trained(level, written, passes=1, foreach=False, **settings):
    """The weights after a step for each of `written`, which a gradient gets; and the skips."""
    model = Spectral()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=foreach)
    ampatch.initialize(model, optimizer, opt_level=level, verbosity=0, **settings)
    x, skipped = torch.randn(5, 6), []
    for number in written:
        optimizer.zero_grad()
        for _ in range(passes):
            with ampatch.scale_loss(model(x).mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
                if number is not None:
                    model.modes.grad[1] = number
        assert model.lazy.grad.is_conj() or passes > 1
        optimizer.step()
        skipped.append(ampatch.step_was_skipped(optimizer))
    ampatch.deactivate()
    return [parameter.detach().clone() for parameter in model.parameters()], skipped


@pytest.mark.usefixtures("scale_lives_on")
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("loss_scale", ["dynamic", 1024.0])
@pytest.mark.parametrize("passes", [1, 2])
def test_they_train_as_without_a_loss_scale(foreach, loss_scale, passes):
    plain, _ = trained("O1", [None] * 4, passes, foreach, enabled=False)
    settings = {"loss_scale": loss_scale, "init_scale": 1024.0}
    weights, skipped = trained("O1", [None] * 4, passes, foreach, **settings)
    assert skipped == [False] * 4
    for ours, other in zip(weights, plain, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("scale_lives_on")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("number", [math.inf, complex(0, math.inf), complex(math.nan, 0)])
def test_they_keep_their_dtype_and_an_overflow_in_one_part_skips_the_step(level, number):
    weights, skipped = trained(level, [None, number, None], init_scale=16.0)
    assert [weight.dtype.is_complex for weight in weights] == [False, True, True]
    assert skipped == [False, True, False]
    assert all(torch.isfinite(weight).all() for weight in weights)
