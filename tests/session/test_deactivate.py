"""`deactivate`: torch, models and optimizers are as they were, with the FP32 values of the masters.

Names in modules: tests/casting/test_early_names.py.
"""

import builtins
import gc
import sys
import types
import weakref
from unittest import mock

import pytest
import session_pairs
import torch
import torch.nn.functional as F
from registrations import forgotten_afterwards
from small_training import backward, close, data, float_grads, grads, managed, pass_back, start
from torch import nn
from torch_snapshot import changes, snapshot

import ampatch
from ampatch.errors import UndoAll
from ampatch.models import conversion
from ampatch.scaling import optimizer as managed_optimizer
from ampatch.session.session import registry


def build():
    model = session_pairs.build()
    model[0].bias.requires_grad_(False)
    return model


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
}


def names(model, optimizer):
    hooks = [
        (name, list(table))
        for module in model.modules()
        for name, table in vars(module).items()
        if "hook" in name and hasattr(table, "__iter__")
    ]
    keys = [set(vars(module)) for module in model.modules()]
    return keys, hooks, set(vars(optimizer))


@pytest.mark.parametrize("kind, skip", [("SGD", True), ("Adam", False)])
def test_everything_is_given_back(opt_level, half, kind, skip):
    model = build()
    optimizer = OPTIMIZERS[kind](model.parameters())
    objects = [*model.parameters(), *model.buffers()]
    before = names(model, optimizer)
    settings = {"opt_level": opt_level, "dtype": half, "loss_scale": "dynamic", "verbosity": 0}
    ampatch.initialize(model, optimizer, **settings)
    assert names(model, optimizer) != before
    for number in range(3):
        session_pairs.one_step(model, optimizer, number)
    if skip:
        pass_back(model(data(0)[0]).float().sum() * torch.nan, optimizer)
        optimizer.step()
        assert ampatch.step_was_skipped(optimizer)
    masters = [param.detach().clone() for param in ampatch.master_params(optimizer)]
    state = [dict(optimizer.state[param]) for param in ampatch.master_params(optimizer)]
    ampatch.deactivate()

    assert names(model, optimizer) == before
    held = [*model.parameters(), *model.buffers()]
    assert all(a is b for a, b in zip(objects, held, strict=True))
    listed = optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(listed, model.parameters(), strict=True))
    for param, master, moved in zip(listed, masters, state, strict=True):
        assert param.dtype is torch.float32 and torch.equal(param, master.float())
        results = optimizer.state.get(param, {})
        assert results.keys() == moved.keys()
        for key, value in moved.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(results[key], value.float()), key
                assert results[key].dtype is torch.float32
    assert set(map(id, optimizer.state)) <= set(map(id, listed))
    if opt_level == "O2":
        inner = [p for p in masters if not torch.equal(p, p.to(half).float())]
        assert inner, "the masters hold no more than half precision: nothing was proved"


@pytest.mark.parametrize("delayed", [False, True])
def test_gradients_move_along(opt_level, delayed):
    model, plain = build(), build()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    ampatch.initialize(model, optimizer, opt_level=opt_level, init_scale=64.0, verbosity=0)
    session_pairs.backward(model, optimizer, 0, delay_unscale=delayed)
    ampatch.deactivate()
    inputs, targets = data(0)
    F.mse_loss(plain(inputs), targets).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None
        else:
            assert ours.grad.dtype is torch.float32
            assert torch.allclose(ours.grad, theirs.grad, atol=5e-3)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_gradients_that_wait_scaled_are_unscaled_where_the_model_alone_is_taken_over(level):
    model, optimizer = start(level, loss_scale=64.0)
    backward(model, optimizer, data(), delay_unscale=True)
    ampatch.initialize(model, opt_level="O1", verbosity=0)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert close(grads(optimizer), float_grads(data()))


def test_twice_is_once_and_without_a_session_nothing():
    ampatch.deactivate()
    model = build()
    ampatch.initialize(model, OPTIMIZERS["SGD"](model.parameters()), opt_level="O2", verbosity=0)
    for _ in range(2):
        ampatch.deactivate()
        assert session_pairs.hook_count(model) == session_pairs.hook_count(build())
        assert all(map(torch.equal, build().state_dict().values(), model.state_dict().values()))


def test_afterwards_memory_is_free_at_once(opt_level):
    """No cycle holds weights and gradients until Python looks for cycles."""
    session_pairs.one_step(*start_pair(opt_level), 0)  # torch keeps the first optimizer that steps
    ampatch.deactivate()
    model, optimizer = start_pair(opt_level)
    session_pairs.one_step(model, optimizer, 0)
    held = [weakref.ref(net) for net in (model, optimizer, *model.parameters())]
    held += [weakref.ref(parameter.grad) for parameter in model.parameters()]
    gc.collect()
    gc.disable()
    try:
        ampatch.deactivate()
        del model, optimizer
        assert [reference() for reference in held if reference() is not None] == []
    finally:
        gc.enable()


def start_pair(level):
    model = session_pairs.build()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    overrides = {"0": "float"}
    ampatch.initialize(model, optimizer, opt_level=level, overrides=overrides, verbosity=0)
    return model, optimizer


# No replacement is left: with mocks, registered functions, on failures

H = torch.float16
FUNCTIONS = ("linear", "conv1d", "conv2d", "softmax", "layer_norm")
ORIGINALS = {name: getattr(F, name) for name in FUNCTIONS}


def begin(**options):
    return managed(nn.Linear(2, 2), **{"level": "O1", "patch_scope": "process", **options}, dtype=H)


def is_plain():
    return {name: getattr(F, name) for name in FUNCTIONS} == ORIGINALS


def dtype_of_zeroed_gradient():
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    model.zero_grad()
    assert model.weight.grad is None
    return torch.float32


USES = {
    "linear": (F, lambda: F.linear(torch.ones(1, 2), torch.ones(1, 2)).dtype),
    "mm": (torch.Tensor, lambda: torch.ones(1, 1).mm(torch.ones(1, 1)).dtype),  # it is inherited
    "zero_grad": (nn.Module, dtype_of_zeroed_gradient),  # it is replaced beside the tables
}


@pytest.mark.parametrize("name", USES)
def test_what_a_mock_puts_back_only_calls_the_original(name):
    """A mock that was made in a session, and ends after it, has found the replacement."""
    owner, use = USES[name]
    level, original = "O2" if owner is nn.Module else "O1", vars(owner).get(name)
    begin(level=level)
    patcher = mock.patch.object(owner, name, lambda *args: "mocked")
    ours, _ = getattr(owner, name), patcher.start()
    ampatch.deactivate()
    assert getattr(owner, name)() == "mocked"
    patcher.stop()
    assert getattr(owner, name) is ours
    try:
        assert use() is torch.float32
        begin(level=level)
        assert use() is (torch.float32 if level == "O2" else H)
        ampatch.deactivate()
        assert use() is torch.float32
    finally:
        delattr(owner, name) if original is None else setattr(owner, name, original)


def test_a_mock_from_before_the_session():
    with mock.patch.object(F, "linear", wraps=F.linear) as mocked:
        begin()
        F.linear(torch.ones(1, 2), torch.ones(2, 2))
        assert mocked.call_args.args[0].dtype is H
        ampatch.deactivate()
        assert F.linear is mocked
    assert is_plain()


@pytest.fixture
def library(monkeypatch):
    library = types.ModuleType("late_library")
    library.dtype_of = lambda x: x.dtype
    monkeypatch.setitem(sys.modules, "late_library", library)
    with forgotten_afterwards():
        yield library


@pytest.mark.parametrize("how, when", [("string", "before"), ("module", "during")])
def test_unregister(library, how, when):
    """Once for all times that it was registered."""
    original = library.dtype_of
    place = ("late_library.dtype_of",) if how == "string" else (library, "dtype_of")
    if when == "during":
        begin()
    for _ in range(2):
        ampatch.register_half_function("late_library.dtype_of")
    assert library.dtype_of(torch.ones(1)) is (H if when == "during" else torch.float32)
    ampatch.unregister_function(*place)
    assert library.dtype_of is original
    if when == "before":
        begin()
    assert library.dtype_of is original and F.linear is not ORIGINALS["linear"]
    with pytest.raises(ValueError, match="late_library.dtype_of is not registered.*nothing"):
        ampatch.unregister_function(*place)


def failing(name):
    def fail(*args, **kwargs):
        raise ValueError(name)

    return fail


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("part", ["uninstall", "unscale_delayed"])
def test_an_optimizer_that_fails_does_not_keep_the_rest(level, part, monkeypatch):
    models, optimizers = zip(*[begin(level=level) for _ in range(3)], strict=True)
    failed = registry.objects.managed(optimizers[1])
    if part == "unscale_delayed":  # of gradients that wait scaled
        fails = {id(failed.gradients): failing(part)}
        unscale = managed_optimizer.unscale_delayed
        monkeypatch.setattr(
            managed_optimizer, part, lambda flow: fails.get(id(flow), unscale)(flow)
        )
    else:
        monkeypatch.setattr(failed, part, failing(part))
    with pytest.raises(ValueError, match=part):
        ampatch.deactivate()
    assert is_plain() and not registry.sessions and registry.state.process_policy is None
    for model, optimizer in zip(models, optimizers, strict=True):
        assert not model._forward_hooks
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert "step" not in vars(optimizer) or (part, optimizer) == ("uninstall", optimizers[1])
    ampatch.deactivate()


def test_a_weight_that_fails_does_not_keep_the_others(monkeypatch):
    model, optimizer = begin(level="O3")
    set_data = conversion.set_data
    monkeypatch.setattr(
        conversion,
        "set_data",
        lambda t, data: failing("weight")() if t is model.weight else set_data(t, data),
    )
    with pytest.raises(ValueError, match="weight"):
        ampatch.deactivate()
    assert model.bias.dtype is torch.float32 and "step" not in vars(optimizer) and is_plain()


def test_several_errors_come_together(monkeypatch):
    models, optimizers = zip(*[begin() for _ in range(3)], strict=True)
    for number, model in enumerate(models[:2]):
        managed_model = registry.objects.managed(model)
        monkeypatch.setattr(managed_model, "uninstall", failing(f"model {number}"))
    kind = getattr(builtins, "ExceptionGroup", ampatch.AmpatchError)
    with pytest.raises(kind, match="2 changes could not be undone"):
        ampatch.deactivate()
    assert is_plain() and not registry.sessions
    assert not models[2]._forward_hooks and "step" not in vars(optimizers[0])


def test_errors_of_a_python_without_groups(monkeypatch):
    monkeypatch.delattr(builtins, "ExceptionGroup", raising=False)
    undo = UndoAll("deactivate()")
    for name in ("one", "two", "two"):
        assert undo.do(failing(name)) is None
    with pytest.raises(ampatch.AmpatchError, match="2 changes.*ValueError: one; ValueError: two"):
        undo.end()


def test_ctrl_c_wins(monkeypatch):
    for strike in (mock.Mock(side_effect=KeyboardInterrupt), failing("model")):
        model, _ = begin()
        monkeypatch.setattr(registry.objects.managed(model), "uninstall", strike)
    with pytest.raises(KeyboardInterrupt):
        ampatch.deactivate()
    assert is_plain() and not registry.sessions


# The fixture that watches torch must itself be able to fail


@pytest.mark.parametrize(
    "title, value", [("torch.mm", torch.bmm), ("torch.Tensor.mul", torch.Tensor.mul)]
)
def test_it_sees_a_replaced_function_and_a_copy_of_an_inherited_method(title, value, monkeypatch):
    before = snapshot()
    monkeypatch.setattr(title, value)
    assert [line.split(":")[0] for line in changes(before, snapshot())] == [title]
    monkeypatch.undo()
    assert changes(before, snapshot()) == []
