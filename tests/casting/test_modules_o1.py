"""torch.nn's modules at O1: really in half, gradients in FP32 and near the FP32 run's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from matrix_kernels import Kernels, run, tensor_of
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import ampatch


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.Tanh(),
            nn.ConvTranspose2d(4, 4, 2),
            nn.GroupNorm(2, 4),
            nn.PReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 3),
        )

    def forward(self, x):
        return self.layers(x.reshape(5, 2, 4, 3).repeat(1, 1, 2, 2))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(20, 8, mode="mean"), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.bag((x * 5).long().abs().clamp(max=19).reshape(-1, 8)))


class Attention(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)


def encoder_layer():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 4, bidirectional=True, batch_first=True)

    def forward(self, x):
        packed = pack_padded_sequence(x, torch.tensor([3, 3, 2, 1, 1]), batch_first=True)
        out, _ = self.rnn(packed)
        return pad_packed_sequence(out, batch_first=True)


MODULES = {
    "linear": lambda: nn.Linear(8, 8),
    "lstm": lambda: nn.LSTM(8, 4, num_layers=2, batch_first=True),
    "gru": lambda: nn.GRU(8, 4, batch_first=True),
    "rnn": lambda: nn.RNN(8, 4, batch_first=True, nonlinearity="relu"),
    "bidirectional lstm": lambda: nn.LSTM(8, 4, bidirectional=True, batch_first=True),
    "projected lstm": lambda: nn.LSTM(8, 4, proj_size=3, batch_first=True),
    "packed gru": Packed,
    "attention": lambda: Attention(False),
    "attention with weights": lambda: Attention(True),
    "encoder layer": encoder_layer,
    "encoder": lambda: nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "conv net": ConvNet,
    "embedding bag": Bag,
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", MODULES)
def test_training_runs_in_half_with_fp32_gradients(name, half):
    torch.manual_seed(0)
    model, x = MODULES[name](), torch.randn(5, 3, 8)
    twin = copy.deepcopy(model)
    reference, expected = run(twin, x)
    model = ampatch.initialize(model, opt_level="O1", dtype=half, verbosity=0)
    with Kernels() as kernels:
        output, grads = run(model, x)
    assert kernels.dtypes() == {half}
    torch.testing.assert_close(output.float(), reference, rtol=0.1, atol=0.05)
    for key, grad in grads.items():
        assert grad.dtype is torch.float32
        error = (grad - expected[key]).norm() / (expected[key].norm() + 1e-3)
        assert error < (0.02 if half is torch.float16 else 0.15), (key, error)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("given", ["float32", "half"])
@pytest.mark.parametrize("name", MODULES)
def test_evaluation_runs_in_half(name, given, half):
    torch.manual_seed(0)
    model, x = MODULES[name]().eval(), torch.randn(5, 3, 8)
    with torch.no_grad():
        reference = tensor_of(model(x))
    model = ampatch.initialize(model, opt_level="O1", dtype=half, verbosity=0)
    x = x if given == "float32" else x.to(half)
    with torch.no_grad(), Kernels() as kernels:
        output = tensor_of(model(x))
    assert kernels.dtypes() == {half}
    torch.testing.assert_close(output.float(), reference, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(cell, half):
    model, x = cell(8, 4), torch.randn(5, 8)
    reference = tensor_of(model(x)).detach()
    model = ampatch.initialize(model, dtype=half, verbosity=0)
    for given in (x, x.to(half)):
        output = tensor_of(model(given))
        assert output.dtype is half
        torch.testing.assert_close(output.detach().float(), reference, rtol=0.1, atol=0.05)


def test_half_input_is_refused_again_without_casting():
    """What the RNNs' own check is for must still work."""
    model = nn.LSTM(8, 4)
    ampatch.initialize(model, dtype=torch.bfloat16, verbosity=0)
    x = torch.randn(3, 5, 8)
    with (
        ampatch.disable_casts(),
        pytest.raises(ValueError, match="weight dtype|must have the type"),
    ):
        torch.nn.LSTM(8, 4)(x.bfloat16())
    with pytest.raises(ValueError):
        model(x.double())
    with pytest.raises(RuntimeError, match="input.size"):
        model(torch.randn(3, 5, 7))


def test_batch_norm_keeps_fp32_statistics(half):
    model = ampatch.initialize(ConvNet(), dtype=half, verbosity=0)
    model(torch.randn(5, 3, 8))
    norm = model.layers[1]
    assert norm.running_mean.dtype is torch.float32 and norm.running_mean.abs().sum() > 0


# Sparse matrices


@pytest.fixture
def sparse():
    torch.manual_seed(0)
    dense = torch.randn(4, 4) * (torch.rand(4, 4) > 0.5)
    return dense


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_compressed_sparse_stays_in_fp32(sparse, layout, half):
    """Its CPU kernels have no half; a half partner (of an earlier layer) comes up to FP32."""
    packed, x = sparse.to_sparse(layout=layout), torch.randn(4, 4)
    expected = [packed @ x, torch.mm(packed, x), F.linear(x, packed)]
    ampatch.initialize([], dtype=half, patch_scope="process", verbosity=0)
    found = [packed @ x, torch.mm(packed, x), F.linear(x, packed)]
    for new, old in zip(found, expected, strict=True):
        assert torch.equal(new, old)
    assert (packed @ x.to(half)).dtype is torch.float32
    assert torch.mm(input=packed, mat2=x).dtype is torch.float32
    assert F.linear(x, sparse).dtype is half


def test_coo_works_in_half(sparse, half):
    ampatch.initialize([], dtype=half, patch_scope="process", verbosity=0)
    found = torch.mm(sparse.to_sparse(), torch.eye(4))
    assert found.dtype is half and torch.equal(found, sparse.to(half))


class Graph(nn.Module):
    """Two graph convolutions with a sparse matrix of FP32 as a buffer."""

    def __init__(self, layout):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer(
            "edges", torch.eye(5).roll(1, 0).add(torch.eye(5)).to_sparse(layout=layout)
        )

    def forward(self, x):
        x = torch.sparse.mm(self.edges, self.one(x)).relu()
        return torch.sparse.addmm(self.two(x), self.edges, self.two(x))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_graph_convolutions_train(level, layout, half):
    plain, model, x = Graph(layout), Graph(layout), torch.randn(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level=level, dtype=half, verbosity=0)
    plain(x).square().sum().backward()
    model(x).square().sum().backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        torch.testing.assert_close(found.grad.float(), expected.grad, rtol=0.05, atol=0.05)
    saved = model.state_dict()
    assert saved["edges"].dtype is torch.float32 and saved["edges"].layout is layout
