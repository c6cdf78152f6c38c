"""torch.nn's modules at O1 beyond `test_module_db.py`: refusals, buffers, sparse matrices."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch


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


def sparse() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 4) * (torch.rand(4, 4) > 0.5)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_compressed_sparse_stays_in_fp32(layout, half):
    """Its CPU kernels have no half; a half partner (of an earlier layer) comes up to FP32."""
    packed, x = sparse().to_sparse(layout=layout), torch.randn(4, 4)
    expected = [packed @ x, torch.mm(packed, x), F.linear(x, packed)]
    ampatch.initialize([], dtype=half, patch_scope="process", verbosity=0)
    outputs = [packed @ x, torch.mm(packed, x), F.linear(x, packed)]
    for new, old in zip(outputs, expected, strict=True):
        assert torch.equal(new, old)
    assert (packed @ x.to(half)).dtype is torch.float32
    assert torch.mm(input=packed, mat2=x).dtype is torch.float32
    assert F.linear(x, sparse()).dtype is half


def test_coo_works_in_half(half):
    ampatch.initialize([], dtype=half, patch_scope="process", verbosity=0)
    product = torch.mm(sparse().to_sparse(), torch.eye(4))
    assert product.dtype is half and torch.equal(product, sparse().to(half))


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
def test_graph_convolutions_train(level, layout):
    plain, model, x = Graph(layout), Graph(layout), torch.randn(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level=level, dtype=torch.bfloat16, verbosity=0)
    plain(x).square().sum().backward()
    model(x).square().sum().backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.grad.float(), expected.grad, rtol=0.05, atol=0.05)
    saved = model.state_dict()
    assert saved["edges"].dtype is torch.float32 and saved["edges"].layout is layout
