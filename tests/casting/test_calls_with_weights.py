"""`F.linear` and the convolutions: an input, a weight and perhaps a bias, against autocast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch
from ampatch.session.registry import registry

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


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_computes_what_autocast_does(name, bias):
    make, shape = LAYERS[name]
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


def in_place(self, x):
    with torch.no_grad():
        self.weight.mul_(2)
    return plain(self, x)


def new_data(self, x):
    self.bias.data = 2 * self.bias.data
    return plain(self, x)


WAYS = {  # what it calls, and the dtype that comes out
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
    changes = what in (in_place, new_data)
    with torch.no_grad():
        weights = [parameter.clone() for parameter in model.parameters()]
    found = model(X)  # from now on the weights are cast together
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        assert torch.equal(parameter, weight) or changes
    assert found.dtype is dtype
    uncast = plain if changes else WITHOUT_CASTS.get(name, what)
    ampatch.deactivate()
    with torch.autocast("cpu", dtype=H, enabled=dtype is H):
        assert torch.equal(found, uncast(model, X))


WITHOUT_CASTS = {"casts off": plain, "all in float": plain}


def test_overrides_of_the_function_win():
    def another_first(self, x):
        torch.mm(self.weight, x.t())  # makes a half copy of the weight
        return F.linear(x, self.weight)

    model = managed(Calls(another_first), overrides={F.linear: "float"})
    for _ in range(2):
        assert model(X).dtype is torch.float32


def test_input_on_a_device_that_is_not_covered():
    def elsewhere(self, x):
        registry.state.current().devices = {"meta"}
        return plain(self, x)

    model = managed(Calls(plain))
    model(X)
    model.what = elsewhere
    assert model(X).dtype is torch.float32


def test_missing_arguments_are_named_as_the_function_is():
    managed(Calls(plain))
    with pytest.raises(TypeError, match=r"linear\(\) missing 1 required .*weight"):
        F.linear(X)


def test_each_use_of_a_half_copy_counts_as_a_hit():
    model = managed(Calls(plain))
    model(X)
    before = ampatch.cache_info()
    model(X)
    after = ampatch.cache_info()
    assert (after.hits - before.hits, after.misses - before.misses) == (2, 2)  # weight and bias
