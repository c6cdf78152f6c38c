"""Functions of torch in attributes of a managed model: cast while it is managed, and given back."""

import functools
import gc
import weakref
from collections import namedtuple

import pytest
import torch
from torch import nn

import ampatch

H = torch.bfloat16
X = torch.rand(2, 16, 16, generator=torch.Generator().manual_seed(0))
Pair = namedtuple("Pair", "function, number")
EARLY = torch.fft.fftn


class Net(nn.Module):
    def __init__(self, held, call):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.held, self.call = nn.Linear(16, 16), held, call

    def forward(self, x):
        return self.call(self.held, self.layer(x))


HELD = {
    "a function": (lambda: torch.logsumexp, lambda held, x: held(x, 1)),
    "a partial": (
        lambda: functools.partial(torch.fft.fftn, dim=(1, 2)),
        lambda held, x: held(x).real,
    ),
    "a partial with a tensor": (
        lambda: functools.partial(torch.matmul, torch.eye(16)),
        lambda held, x: held(x),
    ),
    "a list": (lambda: [torch.exp, torch.log1p], lambda held, x: held[1](held[0](x))),
    "a tuple": (
        lambda: (torch.exp, functools.partial(torch.matmul, torch.eye(16))),
        lambda held, x: held[1](held[0](x)),
    ),
    "a named tuple": (lambda: Pair(torch.logsumexp, 1), lambda held, x: held[0](x, held.number)),
    "a dict": (
        lambda: {"inside": {"f": [torch.matmul]}},
        lambda held, x: held["inside"]["f"][0](x, torch.eye(16)),
    ),
}


WITHOUT_PRODUCTS = ("a function", "a list", "a named tuple")  # with FP32 tensors of their own


@pytest.mark.parametrize(
    "level, name",
    [
        *(("O1", name) for name in HELD),
        *((f"O{n}", name) for n in "23" for name in WITHOUT_PRODUCTS),
    ],
)
def test_what_a_module_holds_computes_as_its_name_does(level, name):
    make, call = HELD[name]
    model = Net(make(), call)
    expected, held = model(X), model.held
    before = repr(held)
    ampatch.initialize(model, opt_level=level, dtype=H, verbosity=0)
    output = model(X)
    torch.testing.assert_close(output.float(), expected, atol=0.1, rtol=0.03)
    ampatch.deactivate()
    assert model.held is held and repr(held) == before
    assert torch.equal(model(X), expected) or level == "O3"


def test_one_identity_and_other_sessions():
    """A later session that exchanges the patches exchanges what is held, too."""
    first, second = (Net([torch.exp], lambda held, x: held[0](x)) for _ in range(2))
    inside, original = first.held, torch.exp
    ampatch.initialize(first, opt_level="O1", dtype=H, verbosity=0)
    assert first.held is inside and first.held[0] is torch.exp is not original
    ampatch.initialize(second, opt_level="O1", dtype=H, verbosity=0, overrides={torch.exp: "half"})
    assert first.held[0] is second.held[0] is torch.exp
    assert second(X).dtype is H and first(X).dtype is torch.float32
    ampatch.deactivate()
    assert first.held[0] is second.held[0] is torch.exp is original


def test_what_holds_itself_and_a_model_that_goes():
    model = Net([torch.exp], lambda held, x: held[0](x))
    model.held.append(model.held)
    model.me = functools.partial(torch.matmul, model.layer.weight)
    ampatch.initialize(model, opt_level="O1", dtype=H, verbosity=0)
    assert model.me(X[0]).dtype is H
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


class OfTheClass(Net):
    early = staticmethod(EARLY)

    def forward(self, x):
        return self.early(self.layer(x))


class InAClosure(Net):
    def forward(self, x):
        return (lambda y: self.call(y))(self.layer(x))


def closure(function):
    def call(x):
        return function(x)

    return call


@pytest.mark.parametrize(
    "model, words",
    [
        (lambda: OfTheClass(None, None), "`self.early` has held `torch.fft.fftn`"),
        (lambda: InAClosure(None, closure(EARLY)), "`function` has held `torch.fft.fftn`"),
    ],
    ids=["a class attribute", "a closure"],
)
def test_the_note_of_an_error_names_what_is_not_reachable(model, words):
    ampatch.initialize(net := model(), opt_level="O1", dtype=H, verbosity=0)
    with pytest.raises(Exception, match="BFloat16") as error:
        net(X)
    notes = "".join(getattr(error.value, "__notes__", [str(error.value)]))
    assert words + " since before `initialize`, so this call is not cast" in notes
