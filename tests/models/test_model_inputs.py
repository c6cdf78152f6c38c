"""O2 and O3: what goes into a model is cast, what comes out is FP32, containers stay."""

import collections
import copy
import dataclasses
import gc
import types
import weakref
from typing import NamedTuple

import pytest
import torch
from small_training import Made
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

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
    "dict": lambda x: {"x": x, "n": 3},
    "ordered": lambda x: collections.OrderedDict(b=x, a=None),
    "list": lambda x: [x, None, "text"],
    "dataclass": lambda x: Data(x, 7),
    "model output": lambda x: Output(x=x, note="n"),
    "read-only": lambda x: types.MappingProxyType({"x": x}),
    "nested": lambda x: {"a": [Point(x, "l"), (Data(x, 1), None)]},
}


LEVELS = pytest.mark.parametrize("level", ["O2", "O3"])


def start(model, level, dtype=torch.float16):
    return ampatch.initialize(model, opt_level=level, dtype=dtype, verbosity=0)


def echo():
    """Remembers what came in, and gives it back."""

    def forward(self, value, *, extra=None):
        self.seen = value, extra
        return value

    return Made(forward, weight=nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize("container", CONTAINERS)
@LEVELS
def test_inputs_and_outputs_keep_their_containers(container, level, half):
    model = start(echo(), level, half)
    make, x = CONTAINERS[container], torch.tensor([1.5, 2.5])
    argument, extra = make(x), make(x * 2)
    output = model(argument, extra=extra)
    for value, expected in (
        *((model.seen[0], make(x.to(half))), (model.seen[1], make(x.to(half) * 2))),
        *((output, make(x)), (argument, make(x))),  # the caller's own is left alone
    ):
        assert type(value) is type(expected) and repr(value) == repr(expected)
    if isinstance(output, Output):
        assert output.x is output["x"] and output.note == "n"


def test_cast_model_outputs(opt_level):
    own = torch.float16 if opt_level == "O1" else torch.float32
    for asked, expected in (
        *((torch.float16, torch.float16), (torch.float32, torch.float32)),
        *(("bfloat16", torch.bfloat16), (None, own)),
    ):
        model = nn.Linear(3, 2)
        ampatch.initialize(model, opt_level=opt_level, cast_model_outputs=asked, verbosity=0)
        assert model(torch.randn(4, 3)).dtype is expected
        ampatch.deactivate()


# Values that half cannot hold


@pytest.mark.parametrize("level, by", [("O2", "position"), ("O2", "later"), ("O3", "keyword")])
def test_inputs_that_half_cannot_hold_count_and_that_is_said(level, by, half, caplog):
    """A number that float16 cannot hold, and one that bfloat16 cannot count to."""
    torch.manual_seed(0)
    model = Made(lambda self, x, big: self.layer(x + big / 1e6), layer=nn.Linear(3, 4))
    plain, x = copy.deepcopy(model), torch.randn(5, 3)
    big = torch.tensor([[1e6, 4097.0, 0.5]]).expand(5, 3)
    ampatch.initialize(model, opt_level=level, dtype=half)
    if by == "later":
        model(x, torch.zeros(5, 3))
    for _ in range(2):
        result = model(x, big=big) if by == "keyword" else model(x, big)
        torch.testing.assert_close(result, plain(x, big), rtol=0.05, atol=0.05)
    said = [message for message in caplog.messages if "cannot" in message]
    assert len(said) == 1 and "Made" in said[0] and "(5, 3)" in said[0]


@LEVELS
def test_infinite_inputs_stay_infinite(level, half):
    model = start(echo(), level, half)
    numbers = torch.tensor([float("inf"), -float("inf"), float("nan"), 1.5])
    output = model(numbers)
    assert model.seen[0].dtype is half and str(output.tolist()) == str(numbers.tolist())


def test_without_a_look_float16_inputs_are_clamped():
    """As in a compiled, traced or captured forward; infinite ones are not."""
    from ampatch.models.io_casting import InputCaster, InputCasts

    inputs = InputCaster("M", torch.float16, lambda: None)
    numbers = torch.tensor([1e9, -1e9, float("inf"), -float("inf"), 2.0])
    traced = make_fx(lambda x: inputs.cast((x,), {}, InputCasts())[0][0])(torch.ones(5))
    assert traced(numbers).tolist() == [65504, -65504, float("inf"), -float("inf"), 2]


# What the forward writes


def writes(write):
    def forward(self, inputs, *, extra=None):
        write(inputs if extra is None else extra)
        return self.weight * 1

    return Made(forward, weight=nn.Parameter(torch.ones(2)))


@LEVELS
@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_the_caller_sees_what_the_forward_writes_into_its_containers(level, keyword, kind):
    def write(inputs):
        del inputs["n"]
        inputs["deep"][0]["new"] = 5
        inputs["deep"].append(inputs["x"])
        inputs.update(x=inputs["x"].float() * 0 + 4.0, y=inputs["x"], z="text")

    def call(model):
        x = torch.tensor([1 / 3, 2.5])
        inputs = kind(x=x, n=3, deep=[{"a": x.clone()}, 1])
        deep = inputs["deep"]
        model(None, extra=inputs) if keyword else model(inputs)
        assert inputs["deep"] is deep and inputs["y"] is x  # the caller's own, not our cast of it
        return inputs

    assert repr(call(start(writes(write), level))) == repr(call(writes(write)))


@LEVELS
def test_the_forward_gets_the_callers_own_container_where_nothing_is_cast(level):
    model = start(echo(), level)
    others = [torch.ones(1).to(dtype) for dtype in (torch.float64, torch.bool, torch.complex64)]
    for inputs in ({}, {"n": torch.arange(3)}, [], others):
        assert model(inputs) is inputs and model.seen[0] is inputs


@LEVELS
@pytest.mark.parametrize("grad", [False, True])
def test_inference_tensors_are_inputs(level, grad, half):
    """Features that were cached under `torch.inference_mode`; a training forward takes them too."""
    both = lambda self, x, rest: self.first(x) + self.first(rest["more"][0])  # noqa: E731
    model = Made(both, first=nn.Linear(4, 4))
    by_hand = copy.deepcopy(model).to(half)
    start(model, level, half)
    with torch.inference_mode():
        x, more = torch.randn(3, 4), torch.randn(3, 4)

    def run(model, dtype):
        with torch.set_grad_enabled(grad):
            return model(x.to(dtype), {"more": [more.to(dtype)]}), model.first(x.to(dtype))

    found, expected = run(model, torch.float32), run(by_hand, half)
    assert all(one.eq(other).all() for one, other in zip(found, expected, strict=True))
    if grad:
        found[0].sum().backward()
        expected[0].sum().backward()
        assert torch.equal(model.first.bias.grad.to(half), by_hand.first.bias.grad)


def test_a_forward_that_raises_leaves_nothing_behind():
    model = start(writes(lambda inputs: inputs["missing"]), "O2")
    tensor = torch.ones(2)
    reference = weakref.ref(tensor)
    with pytest.raises(KeyError):
        model({"x": tensor})
    del tensor
    gc.collect()
    assert reference() is None
