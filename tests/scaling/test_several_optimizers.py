"""Several optimizers: clipped by one norm, in several sessions, forgotten by a block."""

import pytest
import torch
from small_training import Made, backward, data, pass_back, start, train
from torch import nn

import ampatch

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
    for step in range(3):
        body[1].bad = step == 1
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
