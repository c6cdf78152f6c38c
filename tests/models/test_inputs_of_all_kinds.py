"""Inputs that half cannot hold, of every kind of tensor: one rule; and one cast of one tensor."""

import pytest
import torch
from small_training import Made
from torch import nn

import ampatch

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
