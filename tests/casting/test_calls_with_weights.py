"""`F.linear` with weights of a managed model, called in several ways, against autocast."""

import pytest
import torch
import torch.nn.functional as F
from small_training import Made
from torch import nn

import ampatch

H = torch.bfloat16
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def managed(module, **options):
    return ampatch.initialize(module, opt_level="O1", dtype=H, verbosity=0, **options)


def calling(what):
    """A model that calls `what(self, x)` with a weight and a bias at hand."""
    weights = {"weight": nn.Parameter(torch.randn(5, 4)), "bias": nn.Parameter(torch.randn(5))}
    return Made(what, **weights)


def plain(self, x):
    return F.linear(x, self.weight, self.bias)


WAYS = {  # what is called, and the dtype that comes out
    "no bias": (lambda self, x: F.linear(x, self.weight), H),
    "half already": (lambda self, x: F.linear(x.to(H), self.weight, self.bias), H),
    "keywords": (lambda self, x: F.linear(input=x, weight=self.weight, bias=self.bias), H),
    "a weight that is no parameter": (lambda self, x: F.linear(x, 1 * self.weight), H),
    "a bias that is no parameter": (lambda self, x: F.linear(x, self.weight, 1 * self.bias), H),
    "casts off": (ampatch.disable_casts()(plain), torch.float32),
    "all in float": (ampatch.precision("float")(plain), torch.float32),
    "float16 input": (lambda self, x: plain(self, x.half()), H),
    "a parameter for input": (lambda self, x: F.linear(self.weight, self.weight), H),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_call_computes_what_autocast_does(name):
    what, dtype = WAYS[name]
    model = managed(calling(what))
    model(X)
    output = model(X)  # from now on the weights are cast together
    assert output.dtype is dtype
    ampatch.deactivate()
    with torch.autocast("cpu", dtype=H, enabled=dtype is H):
        assert torch.equal(output, (what if dtype is H else plain)(model, X))


def test_overrides_of_the_function_win():
    def another_first(self, x):
        torch.mm(self.weight, x.t())  # makes a half copy of the weight
        return F.linear(x, self.weight)

    model = managed(calling(another_first), overrides={F.linear: "float"})
    for _ in range(2):
        assert model(X).dtype is torch.float32


def test_missing_arguments_are_named_as_the_function_is():
    managed(calling(plain))
    with pytest.raises(TypeError, match=r"linear\(\) missing 1 required .*weight"):
        F.linear(X)
