"""O2 and O3: which inputs are cast, and how; what comes out is FP32, containers stay."""

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


LARGE = 70_001.0  # beyond float16, and no number of bfloat16's eight bits


class Meta(torch.Tensor):
    """As MONAI's and torchvision's: a subclass that keeps its class through calls."""


def jagged(x):
    return torch.nested.nested_tensor(list(x.split([1, 3])), layout=torch.jagged)


def nested(x):
    return torch.nested.nested_tensor(list(x.split([1, 3])))


KINDS = {
    "plain": lambda x: x,
    "a subclass": lambda x: x.as_subclass(Meta),
    "a parameter": nn.Parameter,
    "COO": lambda x: x.to_sparse(),
    "CSR": lambda x: x.to_sparse_csr(),
    "jagged": jagged,
    "nested": nested,
}


class Seen(nn.Module):
    """Notes the dtype that its input has."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen = []

    def forward(self, *inputs):
        self.seen = list(inputs)
        return self.linear(torch.ones(1, 2, dtype=self.linear.weight.dtype))


def managed(level, half):
    return ampatch.initialize(Seen(), opt_level=level, dtype=half, verbosity=0)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*Sparse.*:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_values_that_half_cannot_hold_stay_fp32(level, half, kind):
    make, x = KINDS[kind], torch.eye(4)
    model = managed(level, half)
    model(make(x))
    assert model.seen[0].dtype is half
    model(make(x * LARGE))
    assert model.seen[0].dtype is torch.float32
    assert type(model.seen[0]) is type(make(x))
    model(make(x))
    assert model.seen[0].dtype is torch.float32  # in this place from then on


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_one_tensor_is_cast_once(level, half):
    model, x = managed(level, half), torch.randn(3, 3)
    model(x, x, {"again": x}, [x])
    first, second, inside, listed = model.seen
    assert first is second is inside["again"] is listed[0] and first.dtype is half
    model = Made(lambda self, x: (y := self.layer(x), y), layer=nn.Linear(3, 3))
    first, second = ampatch.initialize(model, opt_level=level, dtype=half, verbosity=0)(x)
    assert first is second and first.dtype is torch.float32


def doubling():
    """Writes into its input in place, by a weight."""
    gain = nn.Parameter(torch.tensor([1.0, 2.0, 0.5]))
    return Made(lambda self, x, again: x.mul_(self.gain) + again, gain=gain)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("needs", [False, True])
def test_what_is_written_into_an_input_is_in_the_graph(level, needs):
    """The caller uses its tensor again: the gradient passes through the write, as in FP32."""

    def gradients(model):
        source = torch.tensor([[1.0, 3.0, 2.0]], requires_grad=needs)
        x = source * 1.0 if needs else source
        out = model(x, x)
        (out.sum() * 0.5 + (x * x).sum()).backward()
        return [x.detach(), source.grad if needs else None, model.gain.grad]

    plain = gradients(doubling())
    model = ampatch.initialize(doubling(), opt_level=level, dtype="bfloat16", verbosity=0)
    for grad, expected in zip(gradients(model), plain, strict=True):
        assert (grad is None) == (expected is None)
        if grad is not None:
            torch.testing.assert_close(grad.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_write_under_no_grad_and_into_a_leaf(level):
    model = ampatch.initialize(doubling(), opt_level=level, dtype="bfloat16", verbosity=0)
    x = torch.tensor([[1.001, 3.0, 2.0], [float("inf"), 1.0, float("nan")]])
    with torch.no_grad():
        model(x, x)
    assert x[0].tolist() == [pytest.approx(1.001, abs=1e-7), 6.0, 1.0]  # unwritten: not rounded
    assert x[1, :2].tolist() == [float("inf"), 2.0] and x[1, 2].isnan()
    leaf = torch.ones(1, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf"):  # as in FP32
        model(leaf, leaf)
    assert model.gain.dtype is (torch.float32 if level == "O2" else torch.bfloat16)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("way", ["no_grad", "detach"])
def test_a_write_outside_of_the_graph_goes_into_a_leaf(level, way):
    """As in FP32, where only a write in the graph is refused."""

    class Clamping(nn.Linear):
        def forward(self, x):
            if way == "detach":
                x.detach().clamp_(min=0)
            else:
                with torch.no_grad():
                    x.clamp_(min=0)
            return super().forward(x)

    model = ampatch.initialize(Clamping(3, 2), opt_level=level, dtype="bfloat16", verbosity=0)
    leaf = torch.tensor([[-1.0, 2.0, -3.0]], requires_grad=True)
    model(leaf).sum().backward()
    assert leaf.tolist() == [[0.0, 2.0, 0.0]] and leaf.is_leaf
    torch.testing.assert_close(leaf.grad, model.weight.sum(0)[None].float(), rtol=0.02, atol=0.02)


@pytest.mark.filterwarnings("ignore:.*MaskedTensor.*:UserWarning")
def test_a_tensor_that_is_made_of_others():
    model = managed("O2", torch.float16)
    masked = torch.masked.masked_tensor(torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool))
    model(masked)
    assert model.seen[0].dtype is torch.float16


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("kind", [list, tuple])
def test_annotations_stay_fp32(level, kind):
    """Boxes in bfloat16 are off by pixels, and torchvision refuses them."""
    seen = []

    def detect(self, images, targets, crops):
        seen.extend([images[0].dtype, *(t["boxes"] for t in targets), crops[0]["x"].dtype])
        return self.layer(images[0]) + targets[0]["boxes"]

    model = Made(detect, layer=nn.Linear(4, 4))
    ampatch.initialize(model, opt_level=level, dtype=torch.bfloat16, verbosity=0)
    boxes = torch.tensor([[501.3, 10.7, 733.9, 99.1]])
    targets = kind([{"boxes": boxes, "labels": torch.tensor([1])}])
    assert model([torch.ones(1, 4)], targets, [{"x": boxes}]).dtype is torch.float32
    assert seen[0] is seen[2] is torch.bfloat16 and seen[1] is boxes
