"""Tools of torch that are replaced together: when, in which order, and at what cost."""

from __future__ import annotations

import operator
import sys
import types

import pytest
import torch
from frames import frames
from torch import nn

import ampatch
from ampatch.casting.places import bound
from ampatch.session.torch_tools import Needs, Tool, TorchTools

NOTHING = Needs(*[False] * len(Needs._fields))
MODULES = 500


@pytest.fixture
def library(monkeypatch):
    """A module with two functions, and one of the user's that has bound both."""
    library, user = types.ModuleType("a_library"), types.ModuleType("a_script")
    library.one, library.two = lambda: "one", lambda: "two"
    user.one, user.two = library.one, library.two
    for module in (library, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return library, user


def tool(library, name, needed):
    def make(original):
        return lambda: f"replaced {original()}"

    return Tool(name, needed, lambda: [(library, name, make)], is_over_tables=name == "two")


def test_each_tool_is_replaced_while_it_is_needed_and_bound_names_follow(library):
    library, user = library
    needed = {"one": operator.attrgetter("models"), "two": operator.attrgetter("optimizers")}
    kept = TorchTools([tool(library, *one) for one in needed.items()], [])

    def seen():
        return [function() for module in (library, user) for function in (module.one, module.two)]

    for needs, expected in [
        (NOTHING, ["one", "two"]),
        (NOTHING._replace(models=True), ["replaced one", "two"]),
        (NOTHING._replace(models=True, optimizers=True), ["replaced one", "replaced two"]),
        (NOTHING._replace(optimizers=True), ["one", "replaced two"]),
        (NOTHING, ["one", "two"]),
    ]:
        kept.take_out_unneeded(needs)
        kept.put_in(needs)
        assert seen() == expected * 2
        kept.take_out_over_tables()  # alone, and it goes in again
        assert seen() == [expected[0], "two"] * 2
        kept.put_in(needs)
        assert seen() == expected * 2


def test_a_tool_that_cannot_be_replaced_does_not_keep_the_others_in(library):
    library, user = library
    needed = operator.attrgetter("models")
    fails = Tool("two", needed, lambda: [(library, "two", lambda original: 1 / 0)])
    kept = TorchTools([tool(library, "one", needed), fails], [])
    one = library.one
    with pytest.raises(ZeroDivisionError):
        kept.put_in(NOTHING._replace(models=True))
    kept.take_out_unneeded(NOTHING)
    assert library.one is user.one is one


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
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def open_and_close():
        ampatch.initialize(model, optimizer, opt_level=opt_level, dtype=torch.bfloat16, verbosity=0)
        ampatch.deactivate()

    open_and_close()
    one = calls_for_modules(lambda: bound([0]), monkeypatch)
    assert one >= MODULES
    found = calls_for_modules(open_and_close, monkeypatch)
    assert found - 4 * one < MODULES / 2
