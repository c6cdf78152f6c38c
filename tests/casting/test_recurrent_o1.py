"""RNN, LSTM, GRU and cells at O1, with weights that are not as `nn` made them; weight norms."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from autocast_oracle import dtypes
from matrix_kernels import Kernels
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_leaves

import ampatch

pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections"),
    pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated"),
]


class Squash(nn.Module):
    """A parametrization: the weight is computed anew from the parameter at each use."""

    def forward(self, weight: Tensor) -> Tensor:
        return torch.tanh(weight) * 0.5


def parametrised(module: nn.Module, name: str) -> nn.Module:
    parametrize.register_parametrization(module, name, Squash())
    return module


def unflattened(module: nn.RNNBase) -> nn.RNNBase:
    """Weights column by column and far apart: not the one block that flatten_parameters makes."""
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
            assert not parameter.is_contiguous()
    return module


KINDS = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
WEIGHTS = {
    "plain": lambda make: make(8, 4),
    "no bias": lambda make: make(8, 4, bias=False),
    "two layers, both ways": lambda make: make(8, 4, 2, bidirectional=True),
    "batch first": lambda make: make(8, 4, batch_first=True),
    "unflattened": lambda make: unflattened(make(8, 4, 2, bidirectional=True)),
    "parametrised": lambda make: parametrised(make(8, 4), "weight_hh_l0"),
    "weight norm": lambda make: parametrizations.weight_norm(make(8, 4), "weight_hh_l0"),
    "old weight norm": lambda make: nn.utils.weight_norm(make(8, 4), "weight_hh_l0"),
    "spectral norm": lambda make: parametrizations.spectral_norm(make(8, 4), "weight_ih_l0"),
    "old spectral norm": lambda make: nn.utils.spectral_norm(make(8, 4), "weight_ih_l0"),
}
CASES = {
    f"{kind}, {weights}": partial(WEIGHTS[weights], KINDS[kind])
    for kind, weights in itertools.product(KINDS, WEIGHTS)
} | {
    "lstm, projected": lambda: nn.LSTM(8, 4, proj_size=3),
    "rnn, relu": lambda: nn.RNN(8, 4, nonlinearity="relu"),
}


def built(build: Callable) -> nn.Module:
    """The same module each time: old weight norms refuse deepcopy."""
    torch.manual_seed(0)
    return build()


def input_as(given: str) -> Any:
    x = torch.randn(5, 3, 8)
    return pack_padded_sequence(x, torch.tensor([5, 3, 1])) if given == "packed" else x


def floats(output: Any) -> list[Tensor]:
    """A module's floating outputs, the insides of packed sequences too."""
    return [
        leaf
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def check(cases: dict[str, tuple[Callable, Any]], half: torch.dtype) -> None:
    """Output in half and all products too, values and gradients near those of FP32."""
    plains = {name: built(build) for name, (build, _) in cases.items()}
    models = {name: built(build) for name, (build, _) in cases.items()}
    references = {name: floats(plains[name](x)) for name, (_, x) in cases.items()}
    for reference in references.values():
        sum(out.square().sum() for out in reference).backward()
    ampatch.initialize(list(models.values()), dtype=half, verbosity=0)
    tolerance = 0.03 if half is torch.float16 else 0.15
    for name, (_, x) in cases.items():
        model, plain = models[name], plains[name]
        with Kernels() as kernels:
            output = floats(model(x))
        assert kernels.dtypes() == {half} == set(dtypes(output)), name
        sum(out.float().square().sum() for out in output).backward()
        for new, old in zip(output, references[name], strict=True):
            torch.testing.assert_close(new.float(), old, rtol=tolerance, atol=tolerance)
        for new, old in zip(model.parameters(), plain.parameters(), strict=True):
            assert new.grad.dtype is torch.float32
            assert (new.grad - old.grad).norm() / (old.grad.norm() + 1e-2) < tolerance, name
        for new, old in zip(model.buffers(), plain.buffers(), strict=True):
            assert new.dtype is old.dtype
            torch.testing.assert_close(new, old, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("given", ["tensor", "packed"])
def test_training(given, half):
    check({name: (build, input_as(given)) for name, build in CASES.items()}, half)


@pytest.mark.parametrize("given", ["tensor", "packed"])
def test_evaluation(given, half):
    models, x = {name: built(build).eval() for name, build in CASES.items()}, input_as(given)
    with torch.no_grad():
        references = {name: floats(model(x))[0] for name, model in models.items()}
    ampatch.initialize(list(models.values()), dtype=half, verbosity=0)
    tolerance = 0.03 if half is torch.float16 else 0.15
    for name, model in models.items():
        for again in (x, x.to(half)):
            with torch.no_grad(), Kernels() as kernels:
                found = floats(model(again))[0]
            assert kernels.dtypes() == {half} and found.dtype is half, name
            torch.testing.assert_close(
                found.float(), references[name], rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("states", ["float32", "half"])
@pytest.mark.parametrize("kind", KINDS)
def test_states_of_either_dtype(kind, states, half):
    """The state of the last batch comes back in half, a fresh one starts in FP32."""
    torch.manual_seed(0)
    model, x = KINDS[kind](8, 4), torch.randn(5, 3, 8)
    state = torch.rand(1, 3, 4)
    state = (state, state.clone()) if kind == "lstm" else state
    reference = model(x, state)[0].detach()
    ampatch.initialize(model, dtype=half, verbosity=0)
    if states == "half":
        state = tuple(s.to(half) for s in state) if kind == "lstm" else state.to(half)
    for given in (x, x.to(half)):
        found = model(given, state)[0]
        assert found.dtype is half
        torch.testing.assert_close(found.detach().float(), reference, rtol=0.1, atol=0.1)


CELLS = {"rnn": nn.RNNCell, "gru": nn.GRUCell, "lstm": nn.LSTMCell}


class Loop(nn.Module):
    """A cell, step by step."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state, outs = None, []
        for step in x:
            state = self.cell(step, state)
            outs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outs)


def test_cells(half):
    x, cases = torch.randn(3, 5, 8), {}
    for kind, cell in CELLS.items():
        cases[kind] = lambda cell=cell: Loop(cell(8, 4)), x
        cases[f"{kind}, parametrised"] = (
            lambda cell=cell: Loop(parametrised(cell(8, 4), "weight_hh")),
            x,
        )
    check(cases, half)


NORMS = {
    "weight norm": parametrizations.weight_norm,
    "old weight norm": nn.utils.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "old spectral norm": nn.utils.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "parametrised": lambda module: parametrised(module, "weight"),
}
LAYERS = {
    "linear": (lambda: nn.Linear(8, 4), (5, 8)),
    "convolution": (lambda: nn.Conv2d(2, 4, 3), (2, 2, 6, 6)),
    "transposed": (lambda: nn.ConvTranspose1d(2, 4, 3), (2, 2, 6)),
}


def test_norms_of_weights(half):
    cases = {
        f"{norm} of {layer}": (lambda norm=norm, make=make: NORMS[norm](make()), torch.randn(shape))
        for norm, (layer, (make, shape)) in itertools.product(NORMS, LAYERS.items())
    }
    check(cases, half)


@pytest.mark.parametrize("norm", NORMS)
def test_norms_in_evaluation(norm, half):
    torch.manual_seed(0)
    model, x = NORMS[norm](nn.Linear(8, 4)).eval(), torch.randn(5, 8)
    with torch.no_grad():
        reference = model(x)
        ampatch.initialize(model, dtype=half, verbosity=0)
        found = model(x)
        with parametrize.cached():
            again = [model(x), model(x)]
    for output in (found, *again):
        assert output.dtype is half
        torch.testing.assert_close(output.float(), reference, rtol=0.1, atol=0.1)
