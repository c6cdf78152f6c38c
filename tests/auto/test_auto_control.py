"""`--auto` comes and goes, refuses AMP code of scripts, and skips a step at an overflow."""

import copy
import gc
import threading
import weakref
from unittest import mock

import pytest
import torch
from auto_loops import SCALE, batch, begin, close, grads, net, weights
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampatch
from ampatch import auto
from ampatch.session.facade import open_sessions


def test_nothing_is_left_behind():
    """What the fixture of every test checks, and what it does not see."""
    replaced = [
        *((torch.optim.Optimizer, name) for name in ("__init__", "__setstate__")),
        *((torch.Tensor, name) for name in ("register_hook", "numpy")),
        *((ampatch, name) for name in ("initialize", "init")),
        (torch.amp.GradScaler, "__init__"),
        (torch.nn.Module, "__call__"),
        (torch.amp.autocast_mode.autocast, "__enter__"),
        (torch.utils.data._utils.fetch._MapDatasetFetcher, "fetch"),
        (torch.autograd, "backward"),
    ]
    before = [vars(owner).get(name) for owner, name in replaced]
    begin()
    assert all(vars(o).get(n) is not b for (o, n), b in zip(replaced, before, strict=True))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = model[0].weight.register_hook(lambda grad: grad * 3)
    ampatch.deactivate()
    assert [vars(owner).get(name) for owner, name in replaced] == before
    assert "step" not in vars(optimizer)
    model(torch.ones(1, 4)).sum().backward()
    tripled = grads(model)[0]
    hook.remove()
    model.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    close(3 * grads(model)[0], tripled)


def test_off_means_off():
    assert auto.start({"enabled": False}) is auto.start({"opt_level": "O0"}) is None
    assert open_sessions() == []


def test_copies_of_optimizers_are_noticed():
    begin({})
    model = net()
    optimizer = copy.deepcopy(torch.optim.SGD(model.parameters(), lr=0.1))
    params = optimizer.param_groups[0]["params"]
    (params[0] * float("inf")).sum().backward()
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert ampatch.step_was_skipped(optimizer)
    assert all(map(torch.equal, params, before))


def test_optimizers_are_held_weakly():
    session = begin({})
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    alive = [weakref.ref(optimizer), weakref.ref(model[0].weight)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    assert session.optimizers == []
    torch.optim.SGD(net().parameters(), lr=0.1)
    assert len(session.optimizer_entries) <= 1


def test_a_pass_waits_for_that_of_another_thread():
    begin()
    pairs = [(model := net(), torch.optim.SGD(model.parameters(), lr=0.1)) for _ in range(2)]
    other = threading.Thread(target=lambda: pairs[1][0](torch.ones(2, 4)).sum().backward())
    seen = []

    def meanwhile(grad):
        other.start()
        other.join(0.2)  # long enough to end, if it did not wait for us

    out = pairs[0][0](torch.ones(2, 4)).float()
    scaled = out * 3.0
    out.register_hook(lambda grad: seen.append(grad.clone()))
    scaled.register_hook(meanwhile)
    scaled.sum().backward()
    other.join()
    close([torch.full((2, 1), 3.0)], seen)


def test_other_amp_code_is_told():
    begin()
    for call, name in (
        (lambda: ampatch.initialize(net()), "ampatch.initialize"),
        (lambda: ampatch.initialize(net(), enabled=False), "ampatch.initialize"),
        (lambda: ampatch.init(), "ampatch.init"),
        (lambda: torch.autocast("cpu").__enter__(), "torch.autocast"),
        (lambda: torch.amp.GradScaler("cpu"), "torch.amp.GradScaler"),
    ):
        told = f"--auto is for scripts without AMP code, and this one calls {name}. "
        with pytest.raises(ampatch.AmpatchError, match=told):
            call()


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
