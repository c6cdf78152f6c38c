"""After `deactivate` no replacement is left: in modules imported later, with mocks, on failures."""

from __future__ import annotations

import builtins
import sys
import textwrap
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from registrations import forgotten_afterwards
from torch import nn

import ampatch
from ampatch.errors import UndoAll
from ampatch.models import conversion

H = torch.float16
FUNCTIONS = ("linear", "conv1d", "conv2d", "softmax", "layer_norm")
ORIGINALS = {name: getattr(F, name) for name in FUNCTIONS}


def start(**options):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(
        model, optimizer, **{"opt_level": "O1", "patch_scope": "process", "verbosity": 0, **options}
    )
    return model, optimizer


def replacements():
    return [
        made
        for made, _ in ampatch.session.session.registry.installation.replacements.pairs.values()
    ]


HOLDERS = """
    import torch
    import torch.nn.functional as F
    from torch.nn.functional import conv1d

    table = {F.linear: "linear", "conv1d": F.conv1d}

    class Layer:
        linear = staticmethod(F.linear)

    def forward(x, w, product=F.linear):
        return product(x, w)
"""


def test_modules_imported_meanwhile(tmp_path, monkeypatch):
    """Their globals are the originals again; what their containers hold calls the originals."""
    (tmp_path / "holders.py").write_text(textwrap.dedent(HOLDERS))
    monkeypatch.syspath_prepend(tmp_path)
    start()
    ours = replacements()
    import holders

    monkeypatch.setitem(sys.modules, "holders", holders)  # forgotten afterwards
    x = torch.ones(1, 2)
    held = (holders.Layer.linear, holders.forward, next(iter(holders.table)))
    assert holders.conv1d in ours and [call(x, x).dtype for call in held] == [H] * 3
    ampatch.deactivate()
    assert holders.conv1d is ORIGINALS["conv1d"]
    assert [call(x, x).dtype for call in held] == [torch.float32] * 3
    start()
    assert F.linear not in held and F.linear(x, x).dtype is H


# Mocks


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
    start(opt_level=level)
    patcher = mock.patch.object(owner, name, lambda *args: "mocked")
    ours, _ = getattr(owner, name), patcher.start()
    ampatch.deactivate()
    assert getattr(owner, name)() == "mocked"
    patcher.stop()
    assert getattr(owner, name) is ours
    try:
        assert use() is torch.float32
        start(opt_level=level)
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


# Registered functions


@pytest.fixture
def late_module(tmp_path, monkeypatch):
    (tmp_path / "late_library.py").write_text("def dtype_of(x):\n    return x.dtype\n")
    monkeypatch.syspath_prepend(tmp_path)
    with forgotten_afterwards():
        yield "late_library"
    sys.modules.pop("late_library", None)


@pytest.mark.parametrize("how, when", [("string", "before"), ("module", "during")])
def test_unregister(late_module, how, when):
    import late_library

    original = late_library.dtype_of
    place = ("late_library.dtype_of",) if how == "string" else (late_library, "dtype_of")
    ampatch.register_half_function("late_library.dtype_of")
    if when == "during":
        start()
        assert late_library.dtype_of(torch.ones(1)) is H
    ampatch.unregister_function(*place)
    assert late_library.dtype_of is original
    if when == "before":
        start()
    assert late_library.dtype_of is original and F.linear is not ORIGINALS["linear"]
    with pytest.raises(ValueError, match="late_library.dtype_of is not registered.*nothing"):
        ampatch.unregister_function(*place)


def test_registered_again_follows_the_new_rule(late_module):
    import late_library

    start()
    ampatch.register_half_function("late_library.dtype_of")
    ampatch.register_half_function(late_library, "dtype_of")
    assert late_library.dtype_of(torch.ones(1)) is H
    ampatch.register_float_function(late_library, "dtype_of")
    assert late_library.dtype_of(torch.ones(1, dtype=H)) is torch.float32
    ampatch.unregister_function("late_library.dtype_of")
    assert late_library.dtype_of.__closure__ is None


# A `deactivate` that fails


def failing(name):
    def fail(*args, **kwargs):
        raise ValueError(name)

    return fail


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("part", ["uninstall", "finish"])
def test_an_optimizer_that_fails_does_not_keep_the_rest(level, part, monkeypatch):
    models, optimizers = zip(*[start(opt_level=level) for _ in range(3)], strict=True)
    registry = ampatch.session.session.registry
    managed = registry.table.managed(optimizers[1])
    owner = managed.gradients if part == "finish" else managed
    monkeypatch.setattr(owner, part, failing(part))
    with pytest.raises(ValueError, match=part):
        ampatch.deactivate()
    assert is_plain() and not registry.sessions and registry.state.process is None
    for model, optimizer in zip(models, optimizers, strict=True):
        assert not model._forward_hooks
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert "step" not in vars(optimizer) or (part, optimizer) == ("uninstall", optimizers[1])
    ampatch.deactivate()


def test_a_weight_that_fails_does_not_keep_the_others(monkeypatch):
    model, optimizer = start(opt_level="O3")
    found = conversion.set_data
    monkeypatch.setattr(
        conversion,
        "set_data",
        lambda t, data: failing("weight")() if t is model.weight else found(t, data),
    )
    with pytest.raises(ValueError, match="weight"):
        ampatch.deactivate()
    assert model.bias.dtype is torch.float32 and "step" not in vars(optimizer) and is_plain()


def test_several_errors_come_together(monkeypatch):
    models, optimizers = zip(*[start() for _ in range(3)], strict=True)
    registry = ampatch.session.session.registry
    for number, model in enumerate(models[:2]):
        monkeypatch.setattr(registry.table.managed(model), "uninstall", failing(f"model {number}"))
    kind = getattr(builtins, "ExceptionGroup", ampatch.AmpatchError)
    with pytest.raises(kind, match="2 parts could not be undone"):
        ampatch.deactivate()
    assert is_plain() and not registry.sessions
    assert not models[2]._forward_hooks and "step" not in vars(optimizers[0])


def test_errors_of_a_python_without_groups(monkeypatch):
    monkeypatch.delattr(builtins, "ExceptionGroup", raising=False)
    undo = UndoAll("deactivate()")
    for name in ("one", "two", "two"):
        assert undo.do(failing(name)) is None
    with pytest.raises(ampatch.AmpatchError, match="2 parts.*ValueError: one; ValueError: two"):
        undo.end()


def test_ctrl_c_wins(monkeypatch):
    registry = ampatch.session.session.registry
    for strike in (mock.Mock(side_effect=KeyboardInterrupt), failing("model")):
        model, _ = start()
        monkeypatch.setattr(registry.table.managed(model), "uninstall", strike)
    with pytest.raises(KeyboardInterrupt):
        ampatch.deactivate()
    assert is_plain() and not registry.sessions
