"""What a call costs that is not cast, counted: Python frames, C calls, aten operators."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ampatch

H = torch.bfloat16
X = torch.ones(2, 2)
UNLISTED = [torch.relu, torch.add, torch.Tensor.add, torch.nn.functional.relu, torch.cat]


def calls(function: Callable, *args) -> list[tuple[str, str]]:
    """`(kind, name)` of every Python and C function called by and below `function(*args)`."""
    found = []

    def profile(frame, event, argument):
        if event == "call":
            found.append((event, frame.f_code.co_name))
        elif event == "c_call":
            found.append((event, argument.__name__))

    with torch.no_grad():
        sys.setprofile(profile)
        try:
            function(*args)
        finally:
            sys.setprofile(None)
    assert found.pop() == ("c_call", "setprofile")
    return found


class Operators(TorchDispatchMode):
    """Counts what reaches the dispatcher."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **kwargs or {})


def operators(function: Callable, *args) -> list:
    with Operators() as counting, torch.no_grad():
        function(*args)
    return counting.seen


MM = ("c_call", "mm")
PATCHED = ("call", "patched")
INACTIVE = {  # how it comes about: the options of initialize, the `with` around the call, the calls
    "disable_casts": ({}, ampatch.disable_casts, [PATCHED, MM]),
    "O2": ({"opt_level": "O2"}, nullcontext, [MM]),
    "O0": ({"opt_level": "O0"}, nullcontext, [MM]),
}


@pytest.mark.parametrize("name", INACTIVE)
def test_an_inactive_call_adds_so_many_calls_and_no_operator(name):
    options, inside, expected = INACTIVE[name]
    ampatch.initialize(nn.Linear(2, 2), dtype=H, verbosity=0, **options)
    with inside():
        assert calls(torch.mm, X, X) == expected
        assert operators(torch.mm, X, X) == [torch.ops.aten.mm.default]


def test_outside_a_model_the_gate_is_what_it_costs_more():
    """`patch_scope="model"`: the gate looks at every argument, and there is no more to it."""
    ampatch.initialize(nn.Linear(2, 2), dtype=H, patch_scope="model", verbosity=0)
    gate = calls(ampatch.session.registry.state.process.gate, (X, X), {})
    assert calls(torch.mm, X, X) == [PATCHED, *gate, MM]
    assert 1 <= len(gate) <= 20
    assert operators(torch.mm, X, X) == [torch.ops.aten.mm.default]


def test_after_deactivate_nothing_is_left():
    before = [torch.mm]
    ampatch.initialize(nn.Linear(2, 2), dtype=H, verbosity=0)
    assert calls(torch.mm, X.to(H), X.to(H))[0] == PATCHED
    held = [torch.mm]
    ampatch.deactivate()
    assert torch.mm is before[0]
    assert calls(torch.mm, X, X) == [MM]
    assert calls(held[0], X, X) == [PATCHED, MM]  # a replacement that somebody kept


@pytest.mark.parametrize("options", [{}, {"patch_scope": "model"}, {"opt_level": "O2"}])
def test_a_call_in_no_table_is_the_same_call(options):
    before = [calls(f, *arguments(f)) for f in UNLISTED]
    ampatch.initialize(nn.Linear(2, 2), dtype=H, verbosity=0, **options)
    assert torch.relu is UNLISTED[0] and torch.Tensor.add is UNLISTED[2]
    assert [calls(f, *arguments(f)) for f in UNLISTED] == before
    assert calls(torch.relu, X) == [("c_call", "relu")]
    assert operators(torch.relu, X) == [torch.ops.aten.relu.default]


def arguments(function: Callable) -> tuple:
    name = function.__name__
    return ([X, X],) if name == "cat" else (X,) if name == "relu" else (X, X)


def test_a_call_that_casts_adds_one_operator_per_cast():
    """The count above can see a cast."""
    ampatch.initialize(nn.Linear(2, 2), dtype=H, verbosity=0)
    cast = torch.ops.aten._to_copy.default
    assert operators(torch.mm, X, X) == [cast, cast, torch.ops.aten.mm.default]
    assert operators(torch.mm, X.to(H), X.to(H)) == [torch.ops.aten.mm.default]
