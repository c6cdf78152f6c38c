"""`F.linear` and the convolutions: an input, a weight and perhaps a bias, against autocast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch

H = torch.bfloat16
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))

LAYERS = {  # a layer of each function, and its input
    "linear": (lambda: nn.Linear(4, 5), (3, 4)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 2, 8)),
    "conv2d": (lambda: nn.Conv2d(2, 4, 3, padding="same", groups=2), (2, 2, 8, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, dilation=2), (1, 2, 4, 4, 4)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(2, 3, 3, stride=2), (2, 2, 8)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(2, 3, 3, output_padding=0), (2, 2, 8, 8)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(2, 3, 2), (1, 2, 3, 3, 3)),
}


def managed(module, **options):
    return ampatch.initialize(module, opt_level="O1", dtype=H, verbosity=0, **options)


class Calls(nn.Module):
    """Calls `what(self, x)` with a weight and a bias at hand."""

    def __init__(self, what):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(5))
        self.what = what

    def forward(self, x):
        return self.what(self, x)


def plain(self, x):
    return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_computes_what_autocast_does(bias):
    for make, shape in LAYERS.values():
        check_layer(make, shape, bias)


def check_layer(make, shape, bias):
    torch.manual_seed(0)
    layer, x = make(), torch.randn(shape)
    if not bias:
        layer.bias = None
    with torch.autocast("cpu", dtype=H):
        expected = layer(x)
    expected.float().sum().backward()
    expected = expected.detach()  # its graph would hold the weights' accumulators
    grads = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    layer = managed(layer)
    layer(x).float().sum().backward()  # from now on the weights are cast together
    layer.zero_grad()
    out = layer(x)
    assert out.dtype is H and torch.equal(out, expected)
    out.float().sum().backward()
    assert all(map(torch.equal, grads, [parameter.grad for parameter in layer.parameters()]))
    ampatch.deactivate()


def in_place(self, x):
    with torch.no_grad():
        self.weight.mul_(2)
    return plain(self, x)


def new_data(self, x):
    self.bias.data = 2 * self.bias.data
    return plain(self, x)


WAYS = {  # what is called, and the dtype that comes out
    "no bias": (lambda self, x: F.linear(x, self.weight), H),
    "half already": (lambda self, x: F.linear(x.to(H), self.weight, self.bias), H),
    "keywords": (lambda self, x: F.linear(input=x, weight=self.weight, bias=self.bias), H),
    "a weight that is no parameter": (lambda self, x: F.linear(x, 1 * self.weight), H),
    "a bias that is no parameter": (lambda self, x: F.linear(x, self.weight, 1 * self.bias), H),
    "a weight changed in the forward": (in_place, H),
    "a bias with new data": (new_data, H),
    "casts off": (ampatch.disable_casts()(plain), torch.float32),
    "all in float": (ampatch.precision("float")(plain), torch.float32),
    "float16 input": (lambda self, x: plain(self, x.half()), H),
    "a parameter for input": (lambda self, x: F.linear(self.weight, self.weight), H),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_call_computes_what_autocast_does(name):
    what, dtype = WAYS[name]
    model = managed(Calls(what))
    model(X)
    found = model(X)  # from now on the weights are cast together
    assert found.dtype is dtype
    ampatch.deactivate()
    changes = what in (in_place, new_data)
    with torch.autocast("cpu", dtype=H, enabled=dtype is H):
        assert torch.equal(found, (plain if changes or dtype is not H else what)(model, X))


def test_overrides_of_the_function_win():
    def another_first(self, x):
        torch.mm(self.weight, x.t())  # makes a half copy of the weight
        return F.linear(x, self.weight)

    model = managed(Calls(another_first), overrides={F.linear: "float"})
    for _ in range(2):
        assert model(X).dtype is torch.float32


def test_missing_arguments_are_named_as_the_function_is():
    managed(Calls(plain))
    with pytest.raises(TypeError, match=r"linear\(\) missing 1 required .*weight"):
        F.linear(X)
