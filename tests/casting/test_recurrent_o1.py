"""RNN, LSTM, GRU and cells at O1, with weights that are not as `nn` made them; weight norms."""

import functools
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from autocast_oracle import dtypes, to
from flat_rnns import in_one_buffer
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


X = torch.randn(5, 8)


class Squash(nn.Module):
    """A parametrization: the weight is computed anew from the parameter at each use."""

    def forward(self, weight: Tensor) -> Tensor:
        return torch.tanh(weight) * 0.5


def parametrised(module: nn.Module, name: str) -> nn.Module:
    parametrize.register_parametrization(module, name, Squash())
    return module


def unflattened(module: nn.RNNBase) -> nn.RNNBase:
    """Weights column by column and far apart: not the one buffer that flatten_parameters makes."""
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
            assert not parameter.is_contiguous()
    return module


KINDS = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
WEIGHTS = {
    "unflattened": lambda make: unflattened(make(8, 4, 2, bidirectional=True)),
    "parametrised": lambda make: parametrised(make(8, 4), "weight_hh_l0"),
    "weight norm": lambda make: parametrizations.weight_norm(make(8, 4), "weight_hh_l0"),
    "old weight norm": lambda make: nn.utils.weight_norm(make(8, 4), "weight_hh_l0"),
    "spectral norm": lambda make: parametrizations.spectral_norm(make(8, 4), "weight_ih_l0"),
    "old spectral norm": lambda make: nn.utils.spectral_norm(make(8, 4), "weight_ih_l0"),
}
RECURRENT = {
    f"{kind}, {weights}": partial(WEIGHTS[weights], KINDS[kind])
    for kind, weights in itertools.product(KINDS, WEIGHTS)
}
"""Plain weights are in `test_module_db.py`."""

NORMS = {
    "weight norm": parametrizations.weight_norm,
    "old weight norm": nn.utils.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "old spectral norm": nn.utils.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "parametrised": lambda module: parametrised(module, "weight"),
}
LINEAR = {name: lambda norm=norm: norm(nn.Linear(8, 4)) for name, norm in NORMS.items()}


def built(build: Callable) -> nn.Module:
    """The same module each time: old weight norms refuse deepcopy."""
    torch.manual_seed(0)
    return build()


def input_as(form: str) -> Any:
    x = torch.randn(5, 3, 8)
    return pack_padded_sequence(x, torch.tensor([5, 3, 1])) if form == "packed" else x


def floats(output: Any) -> list[Tensor]:
    """A module's floating outputs, the insides of packed sequences too."""
    return [
        leaf
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


ROOM = {torch.float16: 0.03, torch.bfloat16: 0.15}


def near(half: torch.dtype, result: Tensor, reference: Tensor) -> None:
    torch.testing.assert_close(result.float(), reference, rtol=ROOM[half], atol=ROOM[half])


def check(cases: dict[str, tuple[Callable, Any]], half: torch.dtype) -> None:
    """Output in half and all products too, values and gradients near those of FP32."""
    plains = {name: built(build) for name, (build, _) in cases.items()}
    models = {name: built(build) for name, (build, _) in cases.items()}
    references = {name: floats(plains[name](x)) for name, (_, x) in cases.items()}
    for reference in references.values():
        sum(out.square().sum() for out in reference).backward()
    ampatch.initialize(list(models.values()), dtype=half, verbosity=0)
    for name, (_, x) in cases.items():
        model, plain = models[name], plains[name]
        with Kernels() as kernels:
            output = floats(model(x))
        assert kernels.dtypes() == {half} == set(dtypes(output)), name
        sum(out.float().square().sum() for out in output).backward()
        for new, old in zip(output, references[name], strict=True):
            near(half, new, old)
        for new, old in zip(model.parameters(), plain.parameters(), strict=True):
            assert new.grad.dtype is torch.float32
            assert (new.grad - old.grad).norm() / (old.grad.norm() + 1e-2) < ROOM[half], name
        for new, old in zip(model.buffers(), plain.buffers(), strict=True):
            assert new.dtype is old.dtype
            near(half, new, old)


def cases_of(form: str) -> dict[str, tuple[Callable, Any]]:
    """What makes each module, and its input: a batch of vectors, or of sequences."""
    if form == "linear":
        return {name: (build, X) for name, build in LINEAR.items()}
    return {name: (build, input_as(form)) for name, build in RECURRENT.items()}


@pytest.mark.parametrize("form", ["linear", "tensor", "packed"])
def test_training(form, half):
    cases = cases_of(form)
    if form == "linear":
        cases["weight norm of a transposed convolution"] = (
            lambda: nn.utils.weight_norm(nn.ConvTranspose1d(2, 4, 3)),
            torch.randn(2, 2, 6),
        )
        for kind, cell in {"rnn": nn.RNNCell, "gru": nn.GRUCell, "lstm": nn.LSTMCell}.items():
            cases[f"{kind} cell"] = (lambda cell=cell: parametrised(cell(8, 4), "weight_hh"), X)
    check(cases, half)


@pytest.mark.parametrize("form", ["linear", "tensor", "packed"])
def test_evaluation(form, half):
    models = {name: (built(build).eval(), x) for name, (build, x) in cases_of(form).items()}
    with torch.no_grad():
        references = {name: floats(model(x))[0] for name, (model, x) in models.items()}
        ampatch.initialize([model for model, _ in models.values()], dtype=half, verbosity=0)
        for name, (model, x) in models.items():
            for again in (x, x.to(half)):
                with Kernels() as kernels:
                    output = floats(model(again))[0]
                assert kernels.dtypes() == {half} and output.dtype is half, name
                near(half, output, references[name])


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_either_dtype(kind, half):
    """The state of the last batch comes back in half, a fresh one starts in FP32."""
    torch.manual_seed(0)
    model, x = KINDS[kind](8, 4), torch.randn(5, 3, 8)
    states = [(torch.rand(1, 3, 4), torch.rand(1, 3, 4))] * 2
    states = [state if kind == "lstm" else state[0] for state in states]
    reference = model(x, states[0])[0].detach()
    ampatch.initialize(model, dtype=half, verbosity=0)
    for state in (states[0], to(half, states[1])):
        for sequence in (x, x.to(half)):
            output = model(sequence, state)[0]
            assert output.dtype is half
            torch.testing.assert_close(output.detach().float(), reference, rtol=0.1, atol=0.1)


class Twice(nn.Module):
    """Two calls of an RNN in a forward, as a loop over time makes them; `between` them."""

    between: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, make: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = make(8, 4, 2, bidirectional=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rnn(x)[0]
        self.between()
        return self.head(self.rnn(x)[0])


@torch.no_grad()
def halve(weight: Tensor) -> None:
    weight.mul_(0.5)


def blocks_in(calls: list[Any]) -> list[int]:
    """The addresses of the weights' blocks of memory in each call; all are half."""
    blocks = []
    for args in calls:
        [weights] = [arg for arg in args if isinstance(arg, list)]
        assert len(weights) == 16 and {weight.dtype for weight in weights} == {torch.float16}
        [block] = {weight.untyped_storage().data_ptr() for weight in weights}
        places = [0, *itertools.accumulate(weight.numel() for weight in weights)][:-1]
        assert [weight.storage_offset() for weight in weights] == places
        blocks.append(block)
    return blocks


@pytest.mark.parametrize("name", ["rnn_tanh", "gru", "lstm"])
def test_copies_lie_in_memory_as_the_weights_do(name, monkeypatch):
    """cuDNN takes them as they are then; else it copies them at every call, and warns."""
    calls: list[Any] = []
    original = getattr(torch._VF, name)

    def watched(*args: Any) -> Any:
        calls.append(args)
        return original(*args)

    monkeypatch.setitem(vars(torch._VF), name, watched)
    x, results = torch.randn(5, 3, 8), []
    for flat in (False, True):
        model = Twice(KINDS[name.removesuffix("_tanh")])
        if flat:
            in_one_buffer(model.rnn)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        ampatch.initialize(model, optimizer, verbosity=0)
        losses = []
        for number in range(3):
            calls.clear()
            if number == 2:  # a copy of what was there before would be a stale weight
                model.between = functools.partial(halve, model.rnn.weight_hh_l0)
            loss = model(x).float().square().mean()
            if flat:
                first, second = blocks_in(calls)
                assert (first == second) is (model.between is Twice.between), "cast anew or not"
            with ampatch.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if number == 1:
                weights = [weight.detach().clone() for weight in model.parameters()]
        results.append([*losses, *weights])
        ampatch.deactivate()
    assert all(map(torch.equal, *results))


def test_weights_that_are_views_of_one_tensor_for_other_reasons():
    """A block is hardly larger than what it holds, and parameters that overlap make none."""
    first, last = (nn.Parameter(torch.eye(4)) for _ in range(2))
    model = nn.LSTM(8, 4)
    parameters = [first, *nn.Linear(8, 64).parameters(), *model.parameters(), last]
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters), parameters)
    expanded = [nn.Parameter(torch.ones(1).expand(4, 4), requires_grad=False)] * 2
    ampatch.initialize(model, patch_scope="process", verbosity=0)
    assert torch.linalg.multi_dot(expanded).dtype is torch.float16
    sizes = []
    keep = lambda copy: sizes.append(copy.untyped_storage().nbytes()) or copy  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda copy: copy):
        model(torch.ones(3, 1, 8))
        torch.linalg.multi_dot([first, last])
    assert 0 < max(sizes) <= 2 * sum(param.numel() for param in model.parameters())
