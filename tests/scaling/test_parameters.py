"""Parameters that are unusual, complex, come late or live elsewhere; groups, several optimizers."""

import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from small_training import Made, backward, data, pass_back, same, seeded, start, step, train, values
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


X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Overflowing(nn.Module):
    """Tanh, whose gradient overflows while `bad`."""

    bad = True

    def forward(self, x):
        x = torch.tanh(x)
        if self.bad and x.requires_grad:
            x.register_hook(lambda grad: grad * float("inf"))
        return x


def finite(module: nn.Module) -> bool:
    return all(bool(param.isfinite().all()) for param in module.parameters())


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clips", ["norm", "value", "apart"])
def test_optimizers_whose_gradients_are_clipped_together_skip_together(level, fused, clips):
    """The norm is inf or NaN, and makes finite gradients of the other NaN."""
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(8, 8), Overflowing()), nn.Linear(8, 8)
    model = nn.Sequential(body, head)
    optimizers = [
        torch.optim.SGD(body.parameters(), lr=0.1, fused=fused),
        torch.optim.AdamW(head.parameters(), lr=0.1, fused=fused),
    ]
    ampatch.initialize(model, optimizers, opt_level=level, verbosity=0)
    skips = []
    for number in range(3):
        body[1].bad = number == 1
        for optimizer in optimizers:
            optimizer.zero_grad()
        pass_back(model(X).square().mean(), optimizers)
        if clips == "apart":
            for part in (body, head):
                torch.nn.utils.clip_grad_norm_(part.parameters(), 1.0)
        elif clips == "norm":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        skips.append([ampatch.step_was_skipped(optimizer) for optimizer in optimizers])
        assert finite(model)
    assert skips == [[False, False], [True, clips == "norm"], [False, False]]
    assert ampatch.loss_scale() == 2.0**15  # once


def begun(level="O1", **options):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ampatch.initialize(model, optimizer, opt_level=level, **options)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("scale", ["dynamic", 128.0, 1.0])
def test_a_loss_of_optimizers_of_two_sessions_is_scaled_once_and_checked_for_both(scale, order):
    """By a dynamic scale, if one of them has such."""
    first, second = nn.Sequential(nn.Linear(8, 8), Overflowing()), nn.Linear(8, 8)
    pair = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    for model, optimizer, loss_scale in zip((first, second), pair, ("dynamic", scale)):
        ampatch.initialize(model, optimizer, opt_level="O0", loss_scale=loss_scale, verbosity=0)
    params = [*first.parameters(), *second.parameters()]
    for overflows in (False, True):
        first[1].bad = overflows
        loss = second(first(X)).square().mean()
        expected = torch.autograd.grad(loss, params, retain_graph=True)
        pass_back(loss, pair[::order])
        assert overflows or all(torch.equal(p.grad, g) for p, g in zip(params, expected))
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
        assert [ampatch.step_was_skipped(optimizer) for optimizer in pair] == [overflows, False]
    assert finite(first) and finite(second)


@pytest.mark.parametrize("order", [1, -1])
def test_a_loss_of_an_enabled_and_a_disabled_session_is_refused(order):
    (model, enabled), (_, disabled) = begun(verbosity=0), begun(enabled=False)
    with pytest.raises(ampatch.AmpatchError, match="enabled=False"):
        ampatch.scale_loss(model(X).mean(), [enabled, disabled][::order])


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize(
    "level, settings", [("O1", {}), ("O2", {}), ("O1", {"loss_scale": 1.0})], ids=str
)
def test_gradients_with_a_graph_are_said_once_under_a_scale(level, settings, caplog):
    model, optimizer = begun(level, init_scale=1024.0, **settings)
    caplog.clear()
    for _ in range(2):
        optimizer.zero_grad()
        with ampatch.scale_loss(model(X).float().pow(3).mean(), optimizer) as scaled:
            scaled.backward(create_graph=True)
    said = [message for message in caplog.messages if "second derivative" in message]
    assert len(said) == (not settings)
    assert all("torch.autograd.grad(loss, parameters, create_graph=True)" in m for m in said)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_mixed_calls_are_cast_to_the_type_of_the_model(level, half):
    """`cast_model_type` may be another half dtype than `dtype`."""
    seen = []

    def forward(self, x):
        seen.append(self.second(self.first(x) + self.table).dtype)

    model = Made(forward, first=nn.Linear(8, 8), second=nn.Linear(8, 8))
    model.register_buffer("table", torch.ones(8))
    other = torch.bfloat16 if half is torch.float16 else torch.float16
    ampatch.initialize(model, opt_level=level, dtype=other, cast_model_type=half, verbosity=0)
    model(X)
    assert seen == [half]


@pytest.mark.parametrize("left_open", [0, 1])
@pytest.mark.parametrize("earlier", [0, 1])
def test_a_block_that_was_never_left_is_dropped_for_all_holders_of_a_tensor(left_open, earlier):
    """The next block looks for earlier gradients once the interrupted one has put them back."""
    model = nn.Linear(8, 1)
    pair = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    ampatch.initialize(model, pair, opt_level="O1", verbosity=0, init_scale=64.0)
    for _ in range(earlier):
        pass_back(model(X).sum(), pair)
    ampatch.scale_loss(model(X).sum(), pair[left_open]).__enter__().backward()
    pass_back(model(X).sum(), pair)
    assert torch.equal(model.bias.grad, torch.tensor([16.0 * (earlier + 1)]))


# Optimizers that a block was not given, and steps without a block, are told of


SAID = "its gradients are still scaled, because they come from"


@pytest.fixture(params=[None, "O0", "O1", "O2"], ids=str)
def pair(request):
    """A generator and a discriminator with an optimizer each: managed together, or the second one
    in a session of its own at this level."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 4), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    if request.param is None:
        ampatch.initialize(models, optimizers, opt_level="O2")
    else:
        for model, optimizer, level in zip(models, optimizers, ("O1", request.param)):
            ampatch.initialize(model, optimizer, opt_level=level)
    return models, optimizers


def block(models, optimizer):
    """The loss goes through both models; only `optimizer` is given."""
    loss = models[1](models[0](torch.ones(2, 4))).float().mean()
    pass_back(loss, optimizer)


@pytest.mark.parametrize("uses", ["steps", "adds"])
def test_a_use_of_gradients_left_scaled_is_said(pair, caplog, uses):
    models, (first, second) = pair
    block(models, first)
    first.step()
    assert SAID not in caplog.text
    if uses == "adds":
        block(models, second)
    second.step()
    assert caplog.text.count(SAID) == 1 and "scale_loss(loss, [first, second])" in caplog.text
    assert FORGOT not in caplog.text  # one thing only


@pytest.mark.parametrize("zero", ["optimizer", "model", "model, to zero", "by hand"])
def test_a_gan_that_zeroes_them_first_is_left_in_peace(pair, caplog, zero):
    models, (first, second) = pair
    for _ in range(3):
        block(models, first)
        first.step()
        if zero == "optimizer":
            second.zero_grad()
        elif zero == "by hand":
            for parameter in models[1].parameters():
                parameter.grad = None
        else:
            models[1].zero_grad(set_to_none=zero == "model")
        first.zero_grad()
        block([lambda x: models[0](x).detach(), models[1]], second)
        second.step()
    assert SAID not in caplog.text


def test_given_both_nothing_is_said(pair, caplog):
    models, optimizers = pair
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        block(models, optimizers)
        for optimizer in optimizers:
            optimizer.step()
    assert SAID not in caplog.text


FORGOT = "without an ampatch.scale_loss block"


def plain(model, optimizer):
    model(torch.ones(2, 4)).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def again(model, optimizer):
    train(model, optimizer)
    optimizer.step()


def in_a_closure(model, optimizer):
    def closure():
        loss = model(torch.ones(2, 4)).float().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def at_a_rate_of_zero(model, optimizer):
    """Libraries make an optimizer's state by it."""
    optimizer.param_groups[0]["lr"] = 0
    plain(model, optimizer)


def with_blocks(model, optimizer):
    for options in ({}, {"delay_unscale": True}, {"delay_overflow_check": True}):
        train(model, optimizer, **options)
    optimizer.zero_grad()
    optimizer.step()  # without any gradient, as some do before the first scheduler step
    optimizer.step(lambda: backward(model, optimizer, data()))


@pytest.mark.parametrize(
    "act, level, settings, count",
    [
        (plain, "O1", {}, 1),
        (plain, "O2", {}, 1),
        (again, "O1", {}, 1),
        (in_a_closure, "O1", {}, 1),
        (at_a_rate_of_zero, "O1", {}, 0),
        (with_blocks, "O2", {}, 0),
        (plain, "O1", {"loss_scale": 1.0}, 0),
        (plain, "O1", {"loss_scale": 128.0}, 0),
        (plain, "O1", {"dtype": torch.bfloat16}, 0),
        (plain, "O0", {}, 0),
        (plain, "O1", {"enabled": False}, 0),
    ],
)
def test_a_dynamic_step_without_a_block_is_said_once(act, level, settings, count, caplog):
    model, optimizer = start(level, verbosity=1, **settings)
    train(model, optimizer)
    assert FORGOT not in caplog.text
    optimizer.zero_grad()
    for _ in range(3):
        act(model, optimizer)
    said = [record for record in caplog.records if FORGOT in record.getMessage()]
    assert len(said) == count
    assert all(r.levelname == "WARNING" and "SGD.step() without" in r.getMessage() for r in said)


def test_one_of_two_is_left_out_beside_another_sessions(caplog):
    """As many optimizers are given as the session has, but they are not all its own."""
    first = [nn.Linear(3, 1) for _ in range(2)]
    mine = [torch.optim.SGD(model.parameters(), lr=0.1) for model in first]
    other = nn.Linear(3, 1)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    ampatch.initialize(first, mine, init_scale=8.0)
    ampatch.initialize(other, theirs, init_scale=8.0)
    loss = sum(model(torch.ones(1, 3)).sum() for model in (*first, other))
    pass_back(loss, [theirs, mine[0]])
    caplog.clear()
    mine[1].step()
    assert "still scaled" in caplog.text
