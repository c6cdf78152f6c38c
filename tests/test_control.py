"""Casting under the user's control: blocks, decorators, registrations, overrides, scope."""

from __future__ import annotations

import inspect
import sys
import threading
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch

X = torch.randn(4, 4)
H = torch.bfloat16


@pytest.fixture
def o1():
    ampatch.initialize([], dtype=H, verbosity=0)


def now() -> tuple:
    """Which dtypes a half and a float function compute in now."""
    return torch.mm(X, X).dtype, torch.exp(X.to(H)).dtype


CASTING = (H, torch.float32)
PLAIN = (torch.float32, H)


def test_blocks_nest_and_restore_what_they_found(o1):
    assert now() == CASTING
    with ampatch.disable_casts():
        assert now() == PLAIN
        with ampatch.disable_casts():
            assert now() == PLAIN
        assert now() == PLAIN  # not switched on by the inner one
    assert now() == CASTING
    with ampatch.precision("float"):
        assert now() == (torch.float32, torch.float32)
        with ampatch.precision("half"):
            pass
        with ampatch.disable_casts():
            assert now() == PLAIN
        assert now() == (torch.float32, torch.float32)
    with ampatch.precision("half"):
        assert now() == (H, H)
    assert now() == CASTING


@pytest.mark.parametrize("block", [ampatch.disable_casts, lambda: ampatch.precision("half")])
def test_an_exception_restores(o1, block):
    with pytest.raises(KeyError), block():
        raise KeyError
    assert now() == CASTING


def test_blocks_are_decorators_and_reenter(o1):
    @ampatch.disable_casts()
    def plain(depth: int) -> list:
        """Its docstring."""
        return [now()] + (plain(depth - 1) if depth else [])

    assert plain(2) == [PLAIN] * 3 and now() == CASTING
    assert plain.__name__ == "plain" and plain.__doc__ == "Its docstring."


def test_blocks_hold_inside_a_managed_forward():
    model = ampatch.initialize(nn.Linear(4, 4), dtype=H, verbosity=0)
    assert model(X).dtype is H
    with ampatch.disable_casts():
        assert model(X).dtype is torch.float32
    with ampatch.precision("float"):
        assert model(X.to(H)).dtype is torch.float32


def test_one_thread_does_not_switch_off_another(o1):
    inside, leave, seen = threading.Event(), threading.Event(), []

    def work():
        with ampatch.disable_casts():
            seen.append(now())
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(10)
    seen.append(now())
    leave.set()
    thread.join()
    assert seen == [PLAIN, CASTING]


def test_wrong_word():
    with pytest.raises(ValueError, match="float"):
        ampatch.precision("flaot")


# Functions of the user's


DECORATORS = {
    ampatch.half_function: (H, H, torch.float64),
    ampatch.float_function: (torch.float32, torch.float32, torch.float64),
    ampatch.promote_function: (torch.float32, torch.float32, torch.float64),
}


@pytest.mark.parametrize("decorate", DECORATORS, ids=lambda function: function.__name__)
def test_decorators(decorate):
    @decorate
    def probe(a, b, *, c):
        return a.dtype, b.dtype, c.dtype

    class Holder:
        @decorate
        def method(self, a, b, *, c):
            assert isinstance(self, Holder)
            return a.dtype, b.dtype, c.dtype

    arguments = (X, X.to(H))
    plain = (torch.float32, H, torch.float64)
    assert probe(*arguments, c=X.double()) == plain
    ampatch.initialize([], dtype=H, verbosity=0)
    assert probe(*arguments, c=X.double()) == DECORATORS[decorate]
    assert Holder().method(*arguments, c=X.double()) == DECORATORS[decorate]
    with ampatch.disable_casts():
        assert probe(*arguments, c=X.double()) == plain
    ampatch.deactivate()
    assert probe(*arguments, c=X.double()) == plain


@pytest.fixture
def library(monkeypatch):
    """A module of the user's, forgotten afterwards."""
    registry = ampatch.session.registry
    monkeypatch.setattr(registry, "_user_functions", [])
    module = types.ModuleType("users_library")
    module.dtype_of = lambda x: x.dtype
    monkeypatch.setitem(sys.modules, "users_library", module)
    yield module
    ampatch.deactivate()


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("dotted", [True, False])
def test_registered_functions(library, early, dotted):
    original = library.dtype_of
    place = ("users_library.dtype_of",) if dotted else (library, "dtype_of")
    if early:
        ampatch.register_half_function(*place)
        assert library.dtype_of(X) is torch.float32
    ampatch.initialize([], dtype=H, verbosity=0)
    if not early:
        ampatch.register_half_function(*place)
    assert library.dtype_of(X) is H
    ampatch.deactivate()
    assert library.dtype_of is original
    ampatch.initialize([], dtype=H, verbosity=0)
    assert library.dtype_of(X) is H


def test_registered_rules(library):
    library.promoted = lambda a, b: (a.dtype, b.dtype)
    ampatch.register_float_function(library, "dtype_of")
    ampatch.register_promote_function("users_library.promoted")
    ampatch.initialize([], dtype=H, verbosity=0)
    assert library.dtype_of(X.to(H)) is torch.float32
    assert library.promoted(X, X.to(H)) == (torch.float32, torch.float32)
    assert library.promoted(X.to(H), X.to(H)) == (H, H)


def test_a_missing_name_is_an_error_and_registers_nothing(library):
    with pytest.raises(AttributeError, match="users_library"):
        ampatch.register_half_function(library, "absent")
    ampatch.initialize([], dtype=H, verbosity=0)


def test_a_module_not_yet_imported(library, tmp_path, monkeypatch):
    (tmp_path / "imported_later_on.py").write_text("def dtype_of(x):\n    return x.dtype\n")
    monkeypatch.syspath_prepend(tmp_path)
    ampatch.register_half_function("imported_later_on.dtype_of")
    ampatch.initialize([], dtype=H, verbosity=0)
    assert "imported_later_on" not in sys.modules
    import imported_later_on

    assert imported_later_on.dtype_of(X) is H
    ampatch.deactivate()
    assert imported_later_on.dtype_of(X) is torch.float32
    del sys.modules["imported_later_on"]


# Overrides


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)})
        self.act = nn.Softmax(-1)

    def forward(self, x):
        self.dtypes = []
        for part in (self.body["one"], self.body["two"], self.act):
            x = part(x)
            self.dtypes.append(x.dtype)
        return x


def dtypes_under(overrides: dict, opt_level: str = "O1") -> list:
    model = ampatch.initialize(
        Net(), opt_level=opt_level, dtype=H, overrides=overrides, verbosity=0
    )
    model(X).sum().backward()
    return model.dtypes


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ({}, [H, H, torch.float32]),
        ({"body.two": "float"}, [H, torch.float32, torch.float32]),
        ({"body.*": "float"}, [torch.float32] * 3),
        ({nn.Linear: "float"}, [torch.float32] * 3),
        ({nn.Linear: "float", "body.one": "half"}, [H, torch.float32, torch.float32]),
        ({nn.Softmax: "half"}, [H, H, H]),
        ({F.linear: "float"}, [torch.float32] * 3),
        ({torch.Tensor.softmax: "half"}, [H, H, H]),
    ],
)
def test_overrides_at_o1(overrides, expected):
    assert dtypes_under(overrides) == expected


def test_overrides_of_a_function_without_a_row():
    ampatch.initialize([], dtype=H, overrides={torch.tanh: "float"}, verbosity=0)
    assert torch.tanh(X.to(H)).dtype is torch.float32
    ampatch.deactivate()
    assert torch.tanh(X.to(H)).dtype is H


def test_overrides_at_o2():
    model = ampatch.initialize(
        Net(), opt_level="O2", dtype=H, overrides={"body.two": "float"}, verbosity=0
    )
    assert model.body["two"].weight.dtype is torch.float32
    assert model.body["one"].weight.dtype is H
    seen = []
    model.body["two"].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    assert model(X).dtype is torch.float32 and seen == [torch.float32]
    assert model.dtypes == [H, H, H]  # its output goes on in half


# Scope


def test_model_scope_leaves_other_models_alone():
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.LSTM(4, 4))
    plain = other(X)[0]
    model = ampatch.initialize(nn.Linear(4, 4), dtype=H, patch_scope="model", verbosity=0)
    found = other(X)[0]
    assert found.dtype is torch.float32 and torch.equal(found, plain)
    output = model(X)
    assert output.dtype is H
    assert F.mse_loss(output, X).dtype is torch.float32
    assert F.cross_entropy(output, torch.arange(4)).dtype is torch.float32
    assert F.linear(X, model.weight).dtype is H
    assert torch.mm(X, X).dtype is torch.float32


def test_process_scope_casts_everything():
    model = ampatch.initialize(nn.Linear(4, 4), dtype=H, verbosity=0)
    assert torch.mm(X, X).dtype is H and nn.Linear(4, 4)(X).dtype is H
    assert model(X).dtype is H


class Interruptible(nn.Module):
    """A layer whose forward can be interrupted as if by Ctrl-C."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.interrupted = False

    def forward(self, x):
        if self.interrupted:
            raise KeyboardInterrupt
        return self.layer(x)


@pytest.mark.parametrize("way_on", ["scale_loss", "step", "deactivate"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_ctrl_c_in_a_forward_leaves_no_policy_behind(level, way_on):
    """torch runs no hooks on KeyboardInterrupt; the model's policy must not outlive it."""
    plain = now()
    ampatch.initialize(nn.Linear(2, 2), verbosity=0)
    model = Interruptible()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = "process" if level != "O1" else "model"
    ampatch.initialize(model, optimizer, opt_level=level, patch_scope=scope, verbosity=0)
    outside = now()
    model.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 4))
    if way_on == "scale_loss":
        with ampatch.scale_loss(torch.ones(1, requires_grad=True).sum(), optimizer):
            assert now() == outside
    elif way_on == "step":
        optimizer.step()
    else:
        ampatch.deactivate()
        outside = plain
    assert now() == outside
    assert not ampatch.session.registry.state.thread.frames


def test_a_decorated_function_keeps_its_name_and_signature():
    @ampatch.half_function
    def attention(query, *, scale=1.0):
        """What it does."""

    assert (attention.__name__, attention.__doc__) == ("attention", "What it does.")
    assert list(inspect.signature(attention).parameters) == ["query", "scale"]
