"""What a call costs that is not cast, counted: Python frames, C calls, aten operators."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from engine import STATE
from operators import Operators
from torch import nn

import ampatch
from ampatch import native

H = torch.bfloat16
IN_PYTHON = native.part is None
X = torch.ones(2, 2)
OURS = str(Path(ampatch.__file__).parent)


def calls(function: Callable, *args, ours: bool = False) -> list[tuple[str, str]]:
    """`(kind, name)` of every Python and C function called by and below `function(*args)`.

    `ours` leaves out the C functions, and the Python functions that are not of this package.
    """
    events = []

    def profile(frame, event, argument):
        if event == "call" and (not ours or frame.f_code.co_filename.startswith(OURS)):
            events.append((event, frame.f_code.co_name))
        elif event == "c_call" and not (ours and argument.__name__ != "setprofile"):
            events.append((event, argument.__name__))

    with torch.no_grad():
        sys.setprofile(profile)
        try:
            function(*args)
        finally:
            sys.setprofile(None)
    assert events.pop() == ("c_call", "setprofile")
    return events


def python_calls(function: Callable, *args, ours: bool = False) -> list[str]:
    return [name for kind, name in calls(function, *args, ours=ours) if kind == "call"]


def operators(function: Callable, *args) -> list:
    with Operators() as counting, torch.no_grad():
        function(*args)
    return counting.seen


def start(model=None, **options) -> nn.Module:
    model = nn.Linear(2, 2) if model is None else model
    return ampatch.initialize(model, **{"dtype": H, "verbosity": 0, **options})


MM = ("c_call", "mm")
INACTIVE = {  # the options of initialize, the `with` around the call, the calls before the original
    "disable_casts": ({}, ampatch.disable_casts, 2),  # ours, and torch's: whether Dynamo traces
    "O2": ({"opt_level": "O2"}, nullcontext, 0),
    "O0": ({"opt_level": "O0"}, nullcontext, 0),
}


@pytest.mark.parametrize("name", INACTIVE)
def test_an_inactive_call_adds_so_many_calls_and_no_operator(name):
    options, inside, expected = INACTIVE[name]
    start(**options)
    with inside():
        events = calls(torch.mm, X, X)
        assert events[-1] == MM and len(events) - 1 == expected
        assert operators(torch.mm, X, X) == [torch.ops.aten.mm.default]


def test_outside_a_model_the_gate_is_what_it_costs_more():
    """`patch_scope="model"`: the condition looks at every argument, and there is no more to it."""
    start(patch_scope="model")
    condition = calls(STATE.process_policy.condition, (X, X), {})
    events = calls(torch.mm, X, X)
    assert events[-1] == MM and len(events) == 1 + len(condition) + 1
    assert 1 <= len(condition) <= 20
    assert operators(torch.mm, X, X) == [torch.ops.aten.mm.default]


def test_a_call_that_casts_adds_one_operator_per_cast_and_after_deactivate_nothing():
    original = [torch.mm]
    start(patch_scope="process")
    cast = torch.ops.aten._to_copy.default
    assert operators(torch.mm, X, X) == [cast, cast, torch.ops.aten.mm.default]
    assert operators(torch.mm, X.to(H), X.to(H)) == [torch.ops.aten.mm.default]
    held = [torch.mm]
    ampatch.deactivate()
    assert torch.mm is original[0] and calls(torch.mm, X, X) == [MM]
    kept = calls(held[0], X, X)  # a replacement that the user's code kept
    assert len(kept) == 2 and kept[-1] == MM


UNLISTED = {
    torch.relu: (X,),
    torch.Tensor.add: (X, X),
    torch.nn.functional.relu: (X,),
    torch.cat: ([X, X],),
}


@pytest.mark.parametrize("options", [{}, {"opt_level": "O2"}])
def test_a_call_in_no_table_is_the_same_call(options):
    before = [calls(function, *args) for function, args in UNLISTED.items()]
    start(**options)
    assert [torch.relu, torch.Tensor.add] == list(UNLISTED)[:2]
    assert [calls(function, *args) for function, args in UNLISTED.items()] == before
    assert operators(torch.relu, X) == [torch.ops.aten.relu.default]


def test_a_call_in_a_forward_makes_so_many_python_calls():
    """Ours, the rule's, and torch's: whether Dynamo traces.  Natively that is all."""

    class Measured(nn.Linear):
        def forward(self, half, single):
            linear, norm = torch.nn.functional.linear, torch.layer_norm
            with_weights = [(linear, x, self.weight, self.bias) for x in (single, half) * 2]
            plain = [(torch.mm, half, half), (torch.mm, half, single), (norm, half, (2,))]
            plain.append((norm, single, (2,), None, None, 1e-5))
            return [[len(python_calls(*call)) for call in kind] for kind in (with_weights, plain)]

    model = start(Measured(2, 2))
    for _ in range(2):  # the second begins with the weights that the first has cast
        with_weights, plain = model(X.to(H), X)
    if IN_PYTHON:
        assert with_weights[-1] <= 19 and max(plain) <= 9
    else:
        assert {*with_weights, *plain} == {3}


FORWARDS = {"O0": 9, "O1": 30, "O2": 39, "O3": 24}
"""Python functions of ours that a forward of one layer calls, the layer's forward among them."""


def of_a_forward(model: nn.Module, level: str) -> int:
    start(model, opt_level=level)
    for _ in range(2):  # the first looks for writes, and notes the weights that it has cast
        python_calls(model, X)
    count = len(python_calls(model, X, ours=True))
    ampatch.deactivate()
    return count


def test_a_managed_forward_adds_so_many_python_calls():
    """A model swaps copies in, its layers do not: more layers add the patched calls in them."""
    added = {}
    for level, most in FORWARDS.items():
        assert of_a_forward(nn.Linear(2, 2), level) <= most, level
        few, many = (nn.Sequential(*(nn.Linear(2, 2) for _ in range(n))) for n in (1, 9))
        added[level] = of_a_forward(many, level) - of_a_forward(few, level)
    assert added["O2"] == added["O3"]
