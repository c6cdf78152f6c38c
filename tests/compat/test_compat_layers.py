"""apex.mlp, apex.fused_dense and apex.reparameterization, beside torch's own layers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampatch
from ampatch.compat import apex as compat

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "name, activation", [("none", nn.Identity()), ("relu", F.relu), ("sigmoid", F.sigmoid)]
)
def test_mlp_is_linear_layers_with_an_activation_after_each(name, activation, bias):
    from apex.mlp import MLP

    mlp = MLP([4, 6, 3], bias=bias, activation=name)
    expected = X
    for weight, of_layer in zip(mlp.weights, mlp.biases or [None] * 2, strict=True):
        expected = activation(F.linear(expected, weight, of_layer))
    assert torch.equal(mlp(X), expected)
    params = list(mlp.parameters())
    grads, wanted = (torch.autograd.grad(out.sum(), params) for out in (mlp(X), expected))
    assert all(map(torch.equal, grads, wanted))
    assert {param.dtype for param in params} == {torch.float32}


def test_names_order_and_start_of_the_parameters_of_an_mlp():
    from apex.mlp.mlp import MLP

    torch.manual_seed(0)
    mlp = MLP([200, 100, 50])
    assert list(mlp.state_dict()) == ["weight_0", "bias_0", "weight_1", "bias_1"]
    assert [tuple(p.shape) for p in mlp.parameters()] == [(100, 200), (100,), (50, 100), (50,)]
    assert [id(p) for p in mlp.weights] == [id(mlp.weight_0), id(mlp.weight_1)]
    assert [id(p) for p in mlp.biases] == [id(mlp.bias_0), id(mlp.bias_1)]
    assert mlp.weight_0.std().item() == pytest.approx((2 / 300) ** 0.5, rel=0.05)
    assert mlp.bias_0.std().item() == pytest.approx(0.1, rel=0.3)
    with pytest.raises(TypeError, match="'gelu'.*sigmoid"):
        MLP([2, 2], activation="gelu")


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_they_compute_in_half_in_a_session(level):
    """At O2 half copies stand in the parameters' places, which a list made before would miss."""
    from apex.fused_dense import FusedDense
    from apex.mlp import MLP

    for model in (MLP([4, 6, 3]), FusedDense(4, 3)):
        expected = model(X)
        if isinstance(model, FusedDense):
            assert torch.equal(expected, F.linear(X, model.weight, model.bias))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compat.amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        output = model(X)
        assert not torch.equal(output.float(), expected)
        torch.testing.assert_close(output.float(), expected, atol=5e-3, rtol=5e-3)
        with compat.amp.scale_loss(output.float().sum(), optimizer) as scaled:
            scaled.backward()
        assert all(param.grad.any() for param in model.parameters())
        ampatch.deactivate()


def model_with_parts() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"words": nn.Embedding(5, 4), "rnn": nn.LSTM(4, 4), "out": nn.Linear(4, 2)}
    )


def outputs(model: nn.Module) -> torch.Tensor:
    return model["out"](model["rnn"](model["words"](torch.tensor([[0, 3, 1]])))[0])


def test_weight_norm_is_put_on_and_removed():
    from apex.reparameterization import apply_weight_norm, remove_weight_norm

    model = model_with_parts()
    before, expected = dict(model.state_dict()), outputs(model)
    drawn = torch.random.get_rng_state()
    assert apply_weight_norm(apply_weight_norm(model)) is model  # twice is once
    normed = {name.split(".original")[0] for name in model.state_dict() if "original" in name}
    assert normed == {
        "rnn.parametrizations.weight_ih_l0",
        "rnn.parametrizations.weight_hh_l0",
        "out.parametrizations.weight",
    }
    torch.testing.assert_close(outputs(model), expected)
    outputs(model).sum().backward()
    gains = model["out"].parametrizations.weight.original0
    assert gains.shape == (2, 1) and gains.grad.any()
    assert remove_weight_norm(model) is model
    assert model.state_dict().keys() == before.keys()
    torch.testing.assert_close(outputs(model), expected)
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_weight_norm_of_one_parameter_loads_apexs_names():
    from apex.reparameterization import apply_weight_norm, remove_weight_norm

    model = model_with_parts()
    apply_weight_norm(model, "out.weight", hook_child=False)
    assert "rnn.weight_hh_l0" in model.state_dict()
    layer = model["out"]
    gains, direction = torch.tensor([[2.0], [3.0]]), torch.eye(2, 4)
    layer.load_state_dict({"bias": layer.bias, "weight_g": gains, "weight_v": direction})
    torch.testing.assert_close(layer.weight, gains * direction)
    nn.utils.parametrizations.orthogonal(model["rnn"], "weight_hh_l0")
    remove_weight_norm(model, remove_all=True)  # and nothing else
    assert "rnn.parametrizations.weight_hh_l0.original" in model.state_dict()
    torch.testing.assert_close(model["out"].weight, gains * direction)
