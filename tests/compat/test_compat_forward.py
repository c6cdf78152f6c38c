"""`model.forward(x)`: `forward` itself is replaced, as by apex, so a direct call is cast as well.

With the `apex` package and without.  What scripts and libraries put there: models/test_own_frames.
"""

import copy

import pytest
import torch
from torch import nn

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
LEVELS = ["O2", "O3"]


class Net(nn.Module):
    """Parts, a weight of its own, and what is computed between them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.calls = 0

    def forward(self, x, *, scale: float = 1.0):
        self.calls += 1
        assert self.weight.dtype is self.first.weight.dtype is torch.float16
        return (torch.relu(self.first(x)) @ self.weight * scale).log_softmax(-1)


def start(package, level, model=None, **options):
    torch.manual_seed(0)
    model = Net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    package.initialize(model, optimizer, opt_level=level, verbosity=1, **options)
    return model, optimizer


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [Net, lambda: nn.Sequential(nn.Linear(8, 4), nn.ReLU())])
def test_a_direct_call_is_a_call_of_the_model(amp, level, make, caplog):
    model, optimizer = start(amp, level, make())
    expected = model(X)
    output = model.forward(X)
    assert output.dtype is torch.float32 and torch.equal(output, expected)
    gradients = []
    for call in (model, model.forward):
        optimizer.zero_grad()
        with amp.scale_loss(call(X).square().mean(), optimizer) as scaled:
            scaled.backward()
        gradients.append([param.grad.clone() for param in model.parameters()])
    assert all(map(torch.equal, *gradients))
    assert "forward" not in caplog.text


def test_the_models_own_forward_runs_once_and_hooks_run_as_in_torch(amp):
    model, _ = start(amp, "O2")
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model.forward(X, scale=2.0)
    assert model.calls == 1 and not seen
    model(X)
    assert model.calls == 2 and seen == [torch.float32]


class Again(Net):
    """A forward that calls itself, and one of its base class."""

    def forward(self, x, depth=1):
        out = super().forward(x)
        return self.forward(x, depth - 1) + out if depth else out


@pytest.mark.parametrize("level", LEVELS)
def test_a_forward_that_calls_itself(amp, level):
    model, _ = start(amp, level, Again())
    assert torch.equal(model.forward(X), model(X))


@pytest.mark.parametrize("level", LEVELS)
def test_a_shallow_copys_forward_is_its_own(amp, level):
    model, _ = start(amp, level)
    twin, replica = copy.copy(model), model._replicate_for_data_parallel()
    assert twin.forward.__self__ is twin and torch.equal(twin.forward(X), model(X))
    assert "forward" in vars(replica)


def test_two_models_that_have_exchanged_their_forwards(amp):
    first, second = (start(amp, "O2", nn.Linear(8, 4))[0] for _ in range(2))
    with torch.no_grad():
        second.weight.mul_(2)
    expected = first(X), second(X)
    first.forward, second.forward = second.forward, first.forward
    assert torch.equal(first.forward(X), expected[1])
    assert torch.equal(second.forward(X), expected[0])
