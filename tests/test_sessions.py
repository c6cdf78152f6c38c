"""Sessions beside and after each other: again, at another level, half failed, forgotten."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from conftest import changes, snapshot
from torch import nn

import ampatch as amp
from ampatch.session import registry

LEVELS = ["O0", "O1", "O2", "O3"]


def build(seed=0, lr=0.1):
    """A small classifier and SGD with momentum."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def step(model, optimizer, seed=0):
    """One training step; returns the loss."""
    data = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(16, 6, generator=data), torch.arange(16) % 3
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return loss.item()


def solo(level, dtype, steps, seed=0):
    """Losses of a training that has the process to itself."""
    model, optimizer = amp.initialize(*build(seed), opt_level=level, dtype=dtype, verbosity=0)
    losses = [step(model, optimizer, number) for number in range(steps)]
    amp.deactivate()
    return losses


@pytest.mark.parametrize("second", LEVELS)
@pytest.mark.parametrize("first", LEVELS)
def test_two_levels_interleaved_each_equal_their_solo_run(first, second, half):
    expected = [solo(first, half, 4), solo(second, half, 4, seed=1)]
    one = amp.initialize(*build(), opt_level=first, dtype=half, verbosity=0)
    two = amp.initialize(*build(1), opt_level=second, dtype=half, verbosity=0)
    seen = [[], []]
    for number in range(4):
        seen[0].append(step(*one, number))
        seen[1].append(step(*two, number))
    if {first, second} & {"O1"} and first != second:
        # the loss is computed outside the models, where the process's O1 rules hold: FP32 anyway
        assert seen == [pytest.approx(losses, abs=1e-6) for losses in expected]
    else:
        assert seen == expected


@pytest.mark.parametrize("second", LEVELS)
@pytest.mark.parametrize("first", LEVELS)
def test_initialize_again_keeps_fp32_values_and_nests_nothing(first, second):
    model, optimizer = build()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    amp.initialize(model, optimizer, opt_level=first, dtype=torch.bfloat16, verbosity=0)
    amp.initialize(model, optimizer, opt_level=second, dtype=torch.bfloat16, verbosity=0)
    assert len(registry.sessions) == 1
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1
    if first != "O3":
        saved = model.state_dict()
        kept = [saved[name] for name, _ in model.named_parameters()]
        tolerance = 0.01 if second == "O3" else 0
        for value, weight in zip(kept, weights, strict=True):
            torch.testing.assert_close(value, weight, atol=tolerance, rtol=tolerance)
    assert [step(model, optimizer) for _ in range(8)][-1] < 0.9
    amp.deactivate()
    assert not {"step", "zero_grad"} & set(vars(optimizer))
    assert "__deepcopy__" not in vars(model) and not model._forward_hooks


def test_set_opt_level_at_run_time(half):
    model, optimizer = amp.initialize(*build(), opt_level="O1", dtype=half, verbosity=0)
    first = step(model, optimizer)
    for level in ("O2", "O0", "O3", "O1", "O2"):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        amp.set_opt_level(model, level)
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                slack = 0.01 if level == "O3" else 0
                torch.testing.assert_close(value, before[name], atol=slack, rtol=slack)
        expected = torch.float32 if level in ("O0", "O1") else half
        assert model[0].weight.dtype is expected
        last = step(model, optimizer)
    assert last < first
    assert amp.loss_scale() == (65536.0 if half is torch.float16 else 1.0)
    masters = [p for p in amp.master_params(optimizer)]
    assert all(parameter.dtype is torch.float32 for parameter in masters)


def test_set_opt_level_of_one_model_among_several():
    (one, first), (two, second) = build(), build(1)
    amp.initialize([one, two], [first, second], opt_level="O1", verbosity=0)
    amp.set_opt_level(two, "O2")
    assert one[0].weight.dtype is torch.float32 and two[0].weight.dtype is torch.float16
    assert one(torch.ones(4, 6)).dtype is torch.float16
    assert two(torch.ones(4, 6)).dtype is torch.float32
    for _ in range(3):
        step(one, first), step(two, second)
    assert next(iter(amp.master_params(second))).dtype is torch.float32


def test_sessions_close_in_any_order():
    before = snapshot()
    amp.initialize(*(first := build()), opt_level="O1", verbosity=0)
    amp.initialize(*build(1), opt_level="O1", dtype=torch.bfloat16, verbosity=0)
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16, "the latest rules"
    registry.sessions[-1].close()
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float16
    assert step(*first) > 0
    registry.sessions[0].close()
    assert changes(before, snapshot()) == []
    amp.deactivate()
    amp.deactivate()


def test_a_failure_half_way_changes_nothing(opt_level, monkeypatch):
    (one, first), (two, second) = build(), build(1)
    before, own = snapshot(), [dict(vars(first)), dict(vars(second))]
    weights = [parameter.detach().clone() for parameter in one.parameters()]
    managed = amp.scaling.optimizer.ManagedOptimizer

    def fail(self, *args):
        if self.optimizer is second:
            raise MemoryError("made up")
        return install(self, *args)

    install = managed.install
    monkeypatch.setattr(managed, "install", fail)
    with pytest.raises(MemoryError, match="made up"):
        amp.initialize([one, two], [first, second], opt_level=opt_level, verbosity=0)
    assert changes(before, snapshot()) == [] and registry.sessions == []
    assert [vars(first), vars(second)] == own
    for parameter, weight in zip(one.parameters(), weights, strict=True):
        assert parameter.dtype is torch.float32 and torch.equal(parameter, weight)
    assert not one._forward_hooks and not two._forward_pre_hooks


def test_what_nobody_uses_any_more_goes(opt_level):
    gone = []
    for number in range(30):
        model, optimizer = amp.initialize(*build(number), opt_level=opt_level, verbosity=0)
        step(model, optimizer)
        gone += [weakref.ref(model), weakref.ref(optimizer)]
        del model, optimizer
        gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)
    amp.initialize(*(kept := build()), opt_level=opt_level, verbosity=0)
    assert len(registry.sessions) == 1
    step(*kept)


@pytest.mark.parametrize("container", [list, tuple])
def test_the_shape_given_is_the_shape_returned(container):
    model, optimizer = build()
    given = container([model]), container([optimizer])
    returned = amp.initialize(*given, verbosity=0)
    assert returned[0] is given[0] and returned[1] is given[1]
    amp.deactivate()
    assert amp.initialize(model, verbosity=0) is model
    amp.deactivate()
    models, single = amp.initialize([model], optimizer, verbosity=0)
    assert models == [model] and single is optimizer


def test_the_environment_overrides_the_script(monkeypatch):
    monkeypatch.setenv("AMPATCH_OPT_LEVEL", "O2")
    monkeypatch.setenv("AMPATCH_DTYPE", "bfloat16")
    model, _ = amp.initialize(*build(), opt_level="O1", verbosity=0)
    assert model[0].weight.dtype is torch.bfloat16
    amp.deactivate()
    monkeypatch.setenv("AMPATCH_OPT_LEVEL", "O1")
    amp.initialize(model, opt_level="O2", keep_batchnorm_fp32=True, verbosity=0)
    assert registry.sessions[-1].properties.keep_batchnorm_fp32 is None, "it was for O2"
    amp.deactivate()
    monkeypatch.setenv("AMPATCH_ENABLED", "0")
    amp.initialize(model, verbosity=0)
    assert model(torch.ones(4, 6)).dtype is torch.float32


def test_disabled_is_plain_pytorch(opt_level):
    plain_model, plain = build()
    model, optimizer = amp.initialize(*build(), enabled=False, opt_level=opt_level)
    for number in range(3):
        data = torch.randn(16, 6, generator=torch.Generator().manual_seed(number))
        plain.zero_grad()
        loss = F.cross_entropy(plain_model(data), torch.arange(16) % 3)
        loss.backward()
        plain.step()
        assert step(model, optimizer, number) == loss.item()
    assert not amp.step_was_skipped(optimizer) and vars(optimizer).keys() == vars(plain).keys()
