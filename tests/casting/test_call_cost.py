"""What a call costs that is not cast, counted: Python frames, C calls, aten operators."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ampatch
from ampatch import native

H = torch.bfloat16
IN_PYTHON = native.part is None
X = torch.ones(2, 2)
UNLISTED = [torch.relu, torch.add, torch.Tensor.add, torch.nn.functional.relu, torch.cat]


OURS = str(Path(ampatch.__file__).parent)


def calls(function: Callable, *args, ours: bool = False) -> list[tuple[str, str]]:
    """`(kind, name)` of every Python and C function called by and below `function(*args)`.

    `ours` leaves out the C functions, and the Python functions that are not of this package.
    """
    found = []

    def profile(frame, event, argument):
        if event == "call" and (not ours or frame.f_code.co_filename.startswith(OURS)):
            found.append((event, frame.f_code.co_name))
        elif event == "c_call" and not (ours and argument.__name__ != "setprofile"):
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
INACTIVE = {  # the options of initialize, the `with` around the call, the calls before the original
    "disable_casts": ({}, ampatch.disable_casts, 2),  # ours, and torch's: whether Dynamo traces
    "O2": ({"opt_level": "O2"}, nullcontext, 0),
    "O0": ({"opt_level": "O0"}, nullcontext, 0),
}


@pytest.mark.parametrize("name", INACTIVE)
def test_an_inactive_call_adds_so_many_calls_and_no_operator(name):
    options, inside, expected = INACTIVE[name]
    ampatch.initialize(nn.Linear(2, 2), dtype=H, verbosity=0, **options)
    with inside():
        found = calls(torch.mm, X, X)
        assert found[-1] == MM and len(found) - 1 == expected
        assert operators(torch.mm, X, X) == [torch.ops.aten.mm.default]


def test_outside_a_model_the_gate_is_what_it_costs_more():
    """`patch_scope="model"`: the gate looks at every argument, and there is no more to it."""
    ampatch.initialize(nn.Linear(2, 2), dtype=H, patch_scope="model", verbosity=0)
    gate = calls(ampatch.session.session.registry.state.process.gate, (X, X), {})
    found = calls(torch.mm, X, X)
    assert found[-1] == MM and len(found) == 1 + len(gate) + 1
    assert 1 <= len(gate) <= 20
    assert operators(torch.mm, X, X) == [torch.ops.aten.mm.default]


def test_after_deactivate_nothing_is_left():
    before = [torch.mm]
    ampatch.initialize(nn.Linear(2, 2), dtype=H, verbosity=0)
    assert calls(torch.mm, X.to(H), X.to(H))[0] != MM
    held = [torch.mm]
    ampatch.deactivate()
    assert torch.mm is before[0]
    assert calls(torch.mm, X, X) == [MM]
    kept = calls(held[0], X, X)  # a replacement that the user's code kept
    assert len(kept) == 2 and kept[-1] == MM


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
    ampatch.initialize(nn.Linear(2, 2), dtype=H, patch_scope="process", verbosity=0)
    cast = torch.ops.aten._to_copy.default
    assert operators(torch.mm, X, X) == [cast, cast, torch.ops.aten.mm.default]
    assert operators(torch.mm, X.to(H), X.to(H)) == [torch.ops.aten.mm.default]


def python_calls(function: Callable, *args, ours: bool = False) -> list[str]:
    return [name for kind, name in calls(function, *args, ours=ours) if kind == "call"]


class Measured(nn.Module):
    """A layer around `function(x, weight, bias, ...)` that notes the Python calls it makes."""

    def __init__(self, weight: torch.Tensor, *rest):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(torch.ones(len(weight)))
        self.rest, self.seen = rest, []

    def forward(self, function, x):
        arguments = (x, self.weight, self.bias, *self.rest)
        self.seen.append(python_calls(function, *arguments))
        self.seen.append(python_calls(function, *arguments))
        return self.seen


@pytest.mark.parametrize("name", ["linear", "conv1d", "conv2d", "conv3d"])
@pytest.mark.parametrize("dtype", [torch.float32, H])
def test_a_layer_s_call_makes_so_many_python_calls(name, dtype):
    """Ours, the rule's, and torch's: whether Dynamo traces.  Natively that is all."""
    dims = 0 if name == "linear" else int(name[4])
    rest = ((1,) * dims, (0,) * dims, (1,) * dims, 1) if dims else ()
    model = Measured(torch.ones(2, 2, *(1,) * dims), *rest)
    ampatch.initialize(model, dtype=H, verbosity=0)
    x = torch.ones(3, 2, *(2,) * dims, dtype=dtype)
    for _ in range(2):  # the second begins with the weights that the first has cast
        model(lambda *args: getattr(torch.nn.functional, name)(*args), x)
    found = len(model.seen[-1]) - 1  # without the lambda
    assert found <= 19 if IN_PYTHON else found == 3


class Plain(nn.Module):
    """Notes how many Python calls those with plain tensors make in a forward."""

    def forward(self, half, single):
        return [
            len(python_calls(torch.mm, half, half)),
            len(python_calls(torch.mm, half, single)),
            len(python_calls(torch.layer_norm, half, (2,))),
            len(python_calls(torch.layer_norm, single, (2,), None, None, 1e-5)),
        ]


def test_a_call_with_plain_tensors_makes_so_many_python_calls():
    """Ours, the rule's, and torch's: whether Dynamo traces.  Natively that is all."""
    model = ampatch.initialize(Plain(), dtype=H, verbosity=0)
    found = model(X.to(H), X)
    assert max(found) <= 9 if IN_PYTHON else found == [3] * 4


FORWARDS = {"O0": 9, "O1": 30, "O2": 47, "O3": 37}
"""Python functions of ours that a forward of one layer calls, the layer's forward among them."""

CHECKPOINT = 119 if IN_PYTHON else 94
"""The same, of a layer in an activation checkpoint, in both passes."""


@pytest.mark.parametrize("level", FORWARDS)
def test_a_managed_forward_adds_so_many_python_calls(level):
    model = ampatch.initialize(nn.Linear(2, 2), opt_level=level, dtype=H, verbosity=0)
    for _ in range(2):  # the first looks for writes, and notes the weights that it has cast
        python_calls(model, X)
    assert len(python_calls(model, X, ours=True)) <= FORWARDS[level]


class Checkpointed(nn.Module):
    """Two layers in a checkpoint each, or without."""

    def __init__(self, count: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_a_checkpoint_adds_so_many_python_calls():
    """Forward and recompute, with what torch's checkpoint asks and restores of autocast."""
    found = []
    for count in (1, 2):
        model = ampatch.initialize(Checkpointed(count), dtype=H, verbosity=0)
        x = X.clone().requires_grad_()

        def step(model=model, x=x):
            with torch.enable_grad():
                model(x).float().sum().backward()

        step()
        found.append(len(python_calls(step, ours=True)))
    assert found[1] - found[0] <= CHECKPOINT, found


def test_weights_are_lent_to_a_model_not_to_its_layers():
    """More layers add the patched calls in them, as at O3."""
    added = {}
    for level in ("O2", "O3"):
        counts = []
        for layers in (1, 9):
            model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
            ampatch.initialize(model, opt_level=level, dtype=H, verbosity=0)
            for _ in range(2):
                python_calls(model, X)
            counts.append(len(python_calls(model, X, ours=True)))
            ampatch.deactivate()
        added[level] = counts[1] - counts[0]
    assert added["O2"] == added["O3"]


def test_switching_casts_off_for_a_step_is_four_python_calls():
    def step():
        with state.casts_off:
            pass

    state = ampatch.session.session.registry.state
    assert len(python_calls(step, ours=True)) == 2
    ampatch.initialize(nn.Linear(2, 2), dtype=H, verbosity=0)
    assert len(python_calls(step, ours=True)) == 4


def test_a_transformer_layer_asks_for_its_fused_path_without_a_walk_over_its_weights():
    model = nn.TransformerEncoderLayer(4, 1, 8, dropout=0.0, batch_first=True)
    ampatch.initialize(model, dtype=H, verbosity=0)
    x = torch.ones(2, 3, 4)
    model(x)
    seen = python_calls(model, x)
    assert "get_fastpath_enabled" in seen and "named_parameters" not in seen
