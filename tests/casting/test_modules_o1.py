"""torch.nn's modules at O1 beyond `test_module_db.py`: refusals, buffers, sparse matrices, kernels.

Torch's fused kernels for attention and transformer layers are for calls that are not cast; those
that are cast take the single calls, as under autocast.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from matrix_kernels import FUSED, Kernels, tensor_of
from small_training import Made
from torch import nn

import ampatch
from ampatch.session import policies


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


PADDING = torch.tensor([[False, False, True]]).expand(5, 3)


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def encoder() -> nn.TransformerEncoder:
    return nn.TransformerEncoder(layer(), 2)


def attention() -> nn.Module:
    inner = nn.MultiheadAttention(8, 2, batch_first=True)
    return Made(lambda self, x, **kwargs: self.inner(x, x, x, **kwargs), inner=inner)


MODELS = {  # module, further arguments
    "attention": (attention, {"need_weights": False}),
    "layer": (layer, {}),
    "encoder": (encoder, {}),
    "padded encoder": (encoder, {"src_key_padding_mask": PADDING}),
}
MAY_NEST = pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:.*nested tensors")


def model_and_input(name: str) -> tuple:
    torch.manual_seed(0)
    make, kwargs = MODELS[name]
    return make(), torch.randn(5, 3, 8), kwargs


@MAY_NEST
@pytest.mark.parametrize("is_part", [False, True])
def test_where_calls_are_cast_the_single_calls_run_in_half(is_part, half):
    """Also in a part of a model that is called by itself, as `model.encode(x)` does."""
    cases = {name: model_and_input(name) for name in MODELS}
    plain = {  # with gradients: not fused
        name: tensor_of(model.eval()(x, **kwargs)).detach()
        for name, (model, x, kwargs) in cases.items()
    }
    models = [case[0] for case in cases.values()]
    managed = nn.ModuleList(models) if is_part else models
    ampatch.initialize(managed, patch_scope="model", dtype=half, verbosity=0)
    room = 0.02 if half is torch.float16 else 0.1
    for name, (model, x, kwargs) in cases.items():
        for query in (x, x.to(half)):
            with torch.no_grad(), Kernels() as kernels:
                output = tensor_of(model(query, **kwargs))
            assert kernels.dtypes() == {half} and not kernels.seen.keys() & FUSED, name
            torch.testing.assert_close(output.float(), plain[name], rtol=room, atol=room)


def evaluated(model: nn.Module, x: torch.Tensor, **kwargs) -> tuple[torch.Tensor, set[str]]:
    with torch.no_grad(), Kernels() as kernels:
        output = tensor_of(model(x, **kwargs))
    return output, set(kernels.seen)


@MAY_NEST
@pytest.mark.parametrize("name", MODELS)
def test_fused_kernels_are_there_where_nothing_is_cast(name, monkeypatch):
    """Outside of a scope, in `disable_casts`, after a session, on a device that is not covered."""
    model, x, kwargs = model_and_input(name)
    plain, kernels = evaluated(model.eval(), x, **kwargs)
    assert kernels & FUSED, "fused nowhere: the test would pass without us"

    def is_fused_as_before() -> None:
        output, kernels = evaluated(model, x, **kwargs)
        assert kernels & FUSED and torch.equal(output, plain)

    ampatch.initialize(nn.Linear(2, 2), patch_scope="model", verbosity=0)
    is_fused_as_before()
    ampatch.initialize(model, verbosity=0)
    with ampatch.disable_casts():
        is_fused_as_before()
    ampatch.deactivate()
    is_fused_as_before()
    monkeypatch.setattr(policies, "initial_cast_devices", lambda: set())  # as where there is a GPU
    ampatch.initialize(nn.Linear(2, 2, device="meta"), verbosity=0)
    is_fused_as_before()


@MAY_NEST
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("name", MODELS)
def test_half_models_take_the_kernels_as_pytorch_does(name, level, half):
    part, x, kwargs = model_and_input(name)
    # torch fuses no layer with hooks: ours are on the whole
    model = Made(lambda self, x, **kwargs: self.part(x, **kwargs), part=part.eval())
    expected, kernels = evaluated(copy.deepcopy(part).to(half), x.to(half), **kwargs)
    ampatch.initialize(model, opt_level=level, dtype=half, verbosity=0)
    output, ours = evaluated(model, x, **kwargs)
    assert ours & FUSED == kernels & FUSED != set()
    assert torch.equal(output, expected.to(output.dtype))
