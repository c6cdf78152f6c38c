"""After `deactivate` no replacement is left: with mocks, registered functions, on failures.

Names in modules: tests/casting/test_early_names.py.
"""

import builtins
import sys
import types
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from registrations import forgotten_afterwards
from small_training import managed
from torch import nn

import ampatch
from ampatch.errors import UndoAll
from ampatch.models import conversion
from ampatch.scaling import optimizer as managed_optimizer
from ampatch.session.session import registry

H = torch.float16
FUNCTIONS = ("linear", "conv1d", "conv2d", "softmax", "layer_norm")
ORIGINALS = {name: getattr(F, name) for name in FUNCTIONS}


def start(**options):
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
    start(level=level)
    patcher = mock.patch.object(owner, name, lambda *args: "mocked")
    ours, _ = getattr(owner, name), patcher.start()
    ampatch.deactivate()
    assert getattr(owner, name)() == "mocked"
    patcher.stop()
    assert getattr(owner, name) is ours
    try:
        assert use() is torch.float32
        start(level=level)
        assert use() is (torch.float32 if level == "O2" else H)
        ampatch.deactivate()
        assert use() is torch.float32
    finally:
        delattr(owner, name) if original is None else setattr(owner, name, original)


def test_a_mock_from_before_the_session():
    with mock.patch.object(F, "linear", wraps=F.linear) as mocked:
        start()
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
        start()
    for _ in range(2):
        ampatch.register_half_function("late_library.dtype_of")
    assert library.dtype_of(torch.ones(1)) is (H if when == "during" else torch.float32)
    ampatch.unregister_function(*place)
    assert library.dtype_of is original
    if when == "before":
        start()
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
    models, optimizers = zip(*[start(level=level) for _ in range(3)], strict=True)
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
    model, optimizer = start(level="O3")
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
    models, optimizers = zip(*[start() for _ in range(3)], strict=True)
    for number, model in enumerate(models[:2]):
        monkeypatch.setattr(
            registry.objects.managed(model), "uninstall", failing(f"model {number}")
        )
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
        model, _ = start()
        monkeypatch.setattr(registry.objects.managed(model), "uninstall", strike)
    with pytest.raises(KeyboardInterrupt):
        ampatch.deactivate()
    assert is_plain() and not registry.sessions
