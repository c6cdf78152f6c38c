"""Where torch's fused kernels for attention and transformer layers belong, and where they do not.

Where calls are cast these modules take the single calls, as under autocast; their dtypes are in
`test_module_db.py`.
"""

import copy

import pytest
import torch
from matrix_kernels import FUSED, Kernels, tensor_of
from small_training import Made
from torch import nn

import ampatch
from ampatch.session import policies

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
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:.*nested tensors")


def model_and_input(name: str) -> tuple:
    torch.manual_seed(0)
    make, kwargs = MODELS[name]
    return make(), torch.randn(5, 3, 8), kwargs


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
