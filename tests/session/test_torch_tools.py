"""Tools of torch that are replaced together: when, in which order, and at what cost."""

import copy
import inspect
import sys
import types

import pytest
import torch
import torch.nn.parallel
from frames import frames
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.nn.parallel import DistributedDataParallel

import ampatch
from ampatch.casting.places import bindings_of

MODULES = 500
PLACES = [
    (torch.nn.utils, "clip_grad_norm_"),
    (nn.Module, "zero_grad"),
    (nn.Module, "state_dict"),
    (torch.Tensor, "data"),
    (torch.Tensor, "__deepcopy__"),
    (torch.jit, "script"),
    (BackwardCFunction, "apply"),
    (DistributedDataParallel, "__init__"),
]


def tools() -> list:
    return [vars(owner).get(name) for owner, name in PLACES]


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def user(monkeypatch):
    """A module of the user's that has bound a tool."""
    user = types.ModuleType("a_script")
    user.clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setitem(sys.modules, "a_script", user)
    return user


@pytest.mark.parametrize("first", [{"opt_level": "O0"}, {"enabled": False}], ids=str)
def test_tools_are_in_from_the_first_session_to_the_last(first, user):
    """At each level, for disabled sessions too; names bound early follow, also past the tables."""
    before, clip = tools(), user.clip
    signature = inspect.signature(DistributedDataParallel.__init__)

    def is_in(*, expected: bool = True):
        replaced = [now is not was for now, was in zip(tools(), before, strict=True)]
        assert replaced == [expected] * len(before)
        assert (user.clip is not clip) is expected
        assert inspect.signature(DistributedDataParallel.__init__) == signature

    model, optimizer = pair()
    ampatch.initialize(model, optimizer, verbosity=0, **first)
    is_in()
    second = ampatch.initialize(*pair(), opt_level="O1", dtype=torch.bfloat16, verbosity=0)
    is_in()  # the tables are above
    del second
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=torch.bfloat16, verbosity=0)
    is_in()
    ampatch.deactivate()
    is_in(expected=False)


def test_a_tool_may_be_a_registered_function_too(user):
    """Whichever comes first, gradients are unscaled where it is called, and all are given back."""
    clip, seen = torch.nn.utils.clip_grad_norm_, []
    settings = {"dtype": torch.bfloat16, "loss_scale": 128.0, "verbosity": 0}
    for levels in (["O0", "O1"], ["O1", "O0"]):
        pairs = [pair() for _ in levels]
        ampatch.register_float_function(torch.nn.utils, "clip_grad_norm_")
        for (model, optimizer), level in zip(pairs, levels, strict=True):
            ampatch.initialize(model, optimizer, opt_level=level, **settings)
        for model, optimizer in pairs:
            loss = model(torch.ones(1, 2)).float().sum()
            with ampatch.scale_loss(loss, optimizer, delay_unscale=True) as scaled:
                scaled.backward()
            seen.append(user.clip(model.parameters(), 1e9).item())
        ampatch.unregister_function(torch.nn.utils, "clip_grad_norm_")
        ampatch.deactivate()
        assert torch.nn.utils.clip_grad_norm_ is user.clip is clip
    assert seen == pytest.approx([6**0.5] * 4)


def test_a_tool_that_cannot_be_replaced_keeps_none_in(user, monkeypatch):
    before = tools()
    model, optimizer = pair()
    with monkeypatch.context() as patch:
        patch.delattr(torch.nn.parallel, "parallel_apply")
        with pytest.raises(AttributeError):
            ampatch.initialize(model, optimizer, opt_level="O0", verbosity=0)
    assert tools() == before and user.clip is torch.nn.utils.clip_grad_norm_
    ampatch.initialize(model, optimizer, opt_level="O0", verbosity=0)
    assert copy.deepcopy(model).weight.dtype is torch.float32


def calls_for_modules(function, monkeypatch) -> int:
    """How many of them are for modules of the process: with so many more modules, the increase."""
    few = frames(function)
    with monkeypatch.context() as patch:
        for number in range(MODULES):
            patch.setitem(sys.modules, f"a_module_{number}", types.ModuleType(f"a_{number}"))
        many = frames(function)
    return many - few


def test_the_modules_of_the_process_are_searched_once_for_all_tools(opt_level, monkeypatch):
    """And once for the tables: when a session opens, and when it closes."""
    model, optimizer = pair()

    def open_and_close():
        ampatch.initialize(model, optimizer, opt_level=opt_level, dtype=torch.bfloat16, verbosity=0)
        ampatch.deactivate()

    open_and_close()
    search = calls_for_modules(lambda: bindings_of([0]), monkeypatch)
    assert search >= MODULES
    results = calls_for_modules(open_and_close, monkeypatch)
    assert results - 4 * search < MODULES / 2
