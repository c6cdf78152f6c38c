"""O2 and O3: what goes into a model is cast, what comes out is FP32, containers stay."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import ampatch


class Point(NamedTuple):
    x: torch.Tensor
    label: str


@dataclasses.dataclass(frozen=True)
class Data:
    x: torch.Tensor
    count: int


class Output(collections.OrderedDict):
    """As transformers' ModelOutput: a dict whose constructor is its own, with attributes."""

    def __init__(self, *, x, note):
        super().__init__(x=x, note=note)
        self.note = note

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


CONTAINERS = {
    "tensor": lambda x: x,
    "dict": lambda x: {"x": x, "n": 3},
    "ordered": lambda x: collections.OrderedDict(b=x, a=None),
    "list": lambda x: [x, None, "text"],
    "tuple": lambda x: (x, 2),
    "namedtuple": lambda x: Point(x, "label"),
    "dataclass": lambda x: Data(x, 7),
    "model output": lambda x: Output(x=x, note="n"),
    "read-only": lambda x: types.MappingProxyType({"x": x}),
    "nested": lambda x: {"a": [Point(x, "l"), (Data(x, 1), None)]},
}


class Echo(nn.Module):
    """Remembers what came in, and gives it back."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen: Any = None

    def forward(self, value, *, extra=None):
        self.seen = value, extra
        return value


def shape_of(value):
    """Types, keys and all that is no tensor, with the tensors' dtypes out of it."""
    if isinstance(value, torch.Tensor):
        return "tensor" if value.is_floating_point() else ("other", value.tolist())
    if isinstance(value, (dict, types.MappingProxyType)):
        return type(value), [(key, shape_of(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [shape_of(item) for item in value]
    if dataclasses.is_dataclass(value):
        return type(value), [shape_of(getattr(value, f.name)) for f in dataclasses.fields(value)]
    return value


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])
    if isinstance(value, (dict, types.MappingProxyType)):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_inputs_and_outputs_keep_their_containers(container, level, half):
    model = Echo()
    ampatch.initialize(model, opt_level=level, dtype=half, verbosity=0)
    given = CONTAINERS[container](torch.tensor([1.5, 2.5]))
    extra = CONTAINERS[container](torch.tensor([3.0]))
    output = model(given, extra=extra)
    for found, dtype, like in (
        (model.seen[0], half, given),
        (model.seen[1], half, extra),
        (output, torch.float32, given),
    ):
        assert shape_of(found) == shape_of(like)
        assert tensors_in(found) and {t.dtype for t in tensors_in(found)} == {dtype}
        assert [t.tolist() for t in tensors_in(found)] == [t.tolist() for t in tensors_in(like)]
    assert {t.dtype for t in tensors_in(given)} == {torch.float32}  # the caller's own is left alone
    if isinstance(output, Output):
        assert output.x is output["x"] and output.note == "n"


def test_integers_masks_and_complex_numbers_pass():
    model = Echo()
    ampatch.initialize(model, opt_level="O3", verbosity=0)
    given = [torch.arange(3), torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.complex64)]
    assert model(given) is given and model.seen[0] is given


def linear(level, **settings):
    return ampatch.initialize(nn.Linear(3, 2), opt_level=level, verbosity=0, **settings)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_cast_model_outputs(level):
    for asked in (torch.float16, torch.float32, "bfloat16"):
        model = linear(level, cast_model_outputs=asked)
        expected = torch.bfloat16 if asked == "bfloat16" else asked
        assert model(torch.randn(4, 3)).dtype is expected
        ampatch.deactivate()


@pytest.mark.parametrize("level, dtype", [("O0", torch.float32), ("O1", torch.float16)])
def test_outputs_without_being_asked(level, dtype):
    assert linear(level)(torch.randn(4, 3)).dtype is dtype
