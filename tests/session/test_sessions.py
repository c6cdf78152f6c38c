"""Sessions: what `initialize` returns, failing, and told by the environment."""

import pytest
import torch
import torch.nn.functional as F
from session_pairs import build, hook_count, one_step, pair, values

import ampatch
from ampatch.session.session import registry

BF16 = torch.bfloat16


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: (x,)])
def test_the_shape_given_is_the_shape_returned(opt_level, wrap):
    model, optimizer = pair()
    arguments = wrap(model), wrap(optimizer)
    models, optimizers = ampatch.initialize(*arguments, opt_level=opt_level, verbosity=0)
    assert (type(models), type(optimizers)) == (type(arguments[0]), type(arguments[1]))
    assert models == wrap(model) and optimizers == wrap(optimizer)
    alone = wrap(build())
    assert ampatch.initialize(alone, opt_level=opt_level, verbosity=0) == alone
    one_step(model, optimizer, 0)


class Raising:
    def __init__(self, event):
        setattr(self, event, self.fail)

    def fail(self, *values):
        raise ZeroDivisionError


@pytest.mark.parametrize("first", [None, "O1", "O2"])
@pytest.mark.parametrize("event", ["on_initialize", "on_replaced"])
def test_a_failure_half_way_leaves_nothing_changed(opt_level, event, first, monkeypatch):
    """At O3 too, where weights are rounded; an earlier session goes on."""
    model, optimizer = pair()
    linear, keys = F.linear, [set(vars(module)) for module in model.modules()]
    F.mse_loss(model(torch.ones(3, 4)), torch.zeros(3, 2)).backward()
    optimizer.step()
    if first is not None:
        ampatch.initialize(model, optimizer, opt_level=first, dtype=BF16, verbosity=0)
    before, params = values(model, optimizer), list(model.parameters())
    earlier, hooks = list(registry.sessions), hook_count(model)
    monkeypatch.setenv("AMPATCH_LOSS_SCALE", "128")  # instead of the script's: this is told
    stop = ampatch.observe(Raising(event))
    try:
        with pytest.raises(ZeroDivisionError):
            ampatch.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    finally:
        stop()
    assert registry.sessions == earlier and hook_count(model) == hooks
    after = values(model, optimizer)
    assert len(before) == len(after) and all(map(torch.equal, before, after))
    for held in (model.parameters(), optimizer.param_groups[0]["params"]):
        assert all(a is b and a.dtype is torch.float32 for a, b in zip(held, params, strict=True))
    if first is None:
        assert F.linear is linear and "step" not in vars(optimizer)
        assert [set(vars(module)) for module in model.modules()] == keys
    else:
        assert ampatch.loss_scale() == 1.0 and one_step(model, optimizer, 0) > 0


@pytest.mark.parametrize("asked", ["O0", "O1", "O2", "O3"])
def test_the_environment_chooses_the_level(monkeypatch, asked, half):
    monkeypatch.setenv("AMPATCH_OPT_LEVEL", asked)
    monkeypatch.setenv("AMPATCH_DTYPE", str(half).removeprefix("torch."))
    model, optimizer = pair()
    ampatch.initialize(
        model, optimizer, opt_level="O2", keep_batchnorm_fp32=True, loss_scale=2.0, verbosity=0
    )
    properties = registry.sessions[-1].properties
    assert (properties.opt_level, properties.dtype) == (asked, half)
    assert model[0].weight.dtype is (half if asked == "O3" else torch.float32)
    assert ampatch.loss_scale() == 2.0


@pytest.mark.parametrize("value, enabled", [("0", False), ("False", False), ("1", True)])
def test_the_environment_switches_it_off(monkeypatch, value, enabled):
    monkeypatch.setenv("AMPATCH_ENABLED", value)
    model, optimizer = pair()
    ampatch.initialize(model, optimizer, opt_level="O3", verbosity=0)
    assert (model[0].weight.dtype is torch.float16) is enabled
    one_step(model, optimizer, 0)
