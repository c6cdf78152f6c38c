"""`--auto`: an overflow skips its step and nothing else."""

from unittest import mock

import pytest
import torch
from auto_loops import SCALE, batch, begin, close, grads, net, weights
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampatch
from ampatch import auto


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_skips_the_step_and_only_it(fused):
    session = begin({})
    model, other_model = net(), net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    other = torch.optim.SGD(other_model.parameters(), lr=0.1)
    x, y = batch()
    before, other_before = weights(model), weights(other_model)
    (F.mse_loss(model(x), y) * float("inf")).backward()
    F.mse_loss(other_model(x), y).backward()
    optimizer.step()
    other.step()
    assert ampatch.step_was_skipped(optimizer) and not ampatch.step_was_skipped(other)
    assert all(map(torch.equal, weights(model), before))
    assert not any(map(torch.equal, weights(other_model), other_before))
    assert session.scalers[0].get() == SCALE / 2


def test_an_overflow_where_every_weight_is_hidden():
    """Reentrant checkpointing shows the outer graph no parameter at all."""
    begin({})
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4, requires_grad=True)
    before = weights(model)
    (checkpoint(model, x, use_reentrant=True).sum() * float("inf")).backward()
    optimizer.step()
    assert ampatch.step_was_skipped(optimizer)
    assert all(map(torch.equal, weights(model), before))


def to_none(model, optimizer):
    for p in model.parameters():
        p.grad = None


ZEROES = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "module": lambda model, optimizer: model.zero_grad(),
    "module, kept": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by hand": to_none,
}


@pytest.mark.parametrize("how", ZEROES)
def test_gradients_thrown_away_take_their_overflow_with_them(how):
    begin({})
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch()
    (F.mse_loss(model(x), y) * float("nan")).backward()
    ZEROES[how](model, optimizer)
    if how != "by hand":
        F.mse_loss(model(x), y).backward()
    optimizer.step()
    assert not ampatch.step_was_skipped(optimizer)


def test_a_failed_pass_leaves_earlier_gradients():
    begin()
    model, x = net(), torch.ones(2, 4, requires_grad=True)
    _optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    before = [*grads(model), x.grad.clone()]
    out = model(x)
    out.register_hook(mock.Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        (out.sum() + x.sum()).backward()
    close(before, [*grads(model), x.grad], atol=0, rtol=0)
    model(x).sum().backward()
    close([2 * grad for grad in before], [*grads(model), x.grad])


def test_errors_are_pytorchs():
    begin()
    model = net()
    _optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong in (torch.ones(2, requires_grad=True) * 1, torch.ones(())):
        with pytest.raises(RuntimeError, match="grad can be implicitly created|does not require"):
            wrong.backward()


@pytest.mark.parametrize("level, dtype", [(None, None), ("O1", torch.bfloat16), ("O4", None)])
def test_half_dtypes(level, dtype):
    asked = {"opt_level": level, "dtype": dtype}
    session = auto.start({name: value for name, value in asked.items() if value is not None})
    half = torch.float16 if (level, dtype) == (None, None) else torch.bfloat16
    assert net()(torch.ones(1, 4)).dtype is half
    assert session.scalers[0].is_dynamic == (half is torch.float16)
