"""Under `--auto` modules with parameters are cast; data, labels and metrics are FP32's."""

from unittest import mock

import pytest
import torch
from small_training import Made, in_threads
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampatch
from ampatch import auto

H, FP32 = torch.bfloat16, torch.float32
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def net(forward=lambda self, x: self.layer(x @ x.T @ x)):
    return Made(forward, layer=nn.Linear(16, 16))


class Whitening(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("matrix", torch.eye(16))

    def forward(self, x):
        return x @ self.matrix


@pytest.fixture
def session():
    yield auto.start({"dtype": H})
    ampatch.deactivate()


def whitened():
    centered = X - X.mean(0)
    values, vectors = torch.linalg.eigh(centered.T @ centered / len(X))
    z = centered @ vectors @ torch.diag(values.clamp_min(1e-3).rsqrt()) @ vectors.T
    labels = (z @ torch.ones(16, 3).cumsum(0)).argmax(1)
    return z, labels, torch.cdist(z, z), Whitening()(z), F.conv1d(X[None], torch.ones(4, 8, 3))


def test_data_labels_and_metrics_are_those_of_fp32_to_the_bit():
    expected = whitened()
    auto.start({"dtype": H})
    net()(X)  # casts have begun, and ended
    under_auto = whitened()
    ampatch.deactivate()
    for tensor, other in zip(expected, under_auto, strict=True):
        assert tensor.dtype is other.dtype and torch.equal(tensor, other)


def test_what_is_cast(session):
    model, weight = net(), nn.Parameter(torch.ones(16, 4))
    output = model(X)
    assert output.dtype is H and (output @ output.T).dtype is H
    assert nn.Sequential(Whitening(), model)[0](X).dtype is FP32
    for tensor in (weight, weight.t().t(), weight[:, :2], (weight * 2).exp()):
        assert (X @ tensor).dtype is H
    with torch.no_grad():
        assert (X @ weight).dtype is (X @ weight[:, :2]).dtype is H
    unit = F.normalize(model(X).float(), dim=1)
    assert (unit @ unit.T).dtype is H, "it leads back to parameters"
    assert (unit.detach() @ unit.detach().T).dtype is FP32
    bare = torch.ones(16, 4, requires_grad=True)
    assert (X @ bare).dtype is ((X @ bare).exp() @ bare.T).dtype is FP32
    with torch.autocast("cpu", enabled=False):
        assert model(X).dtype is FP32


def test_a_forward_that_raises_ends_its_casts(session):
    for kind in (KeyError, KeyboardInterrupt):
        with pytest.raises(kind):
            net(mock.Mock(side_effect=kind))(X)
        assert (X @ X.T).dtype is FP32, kind


def test_threads_and_checkpoints(session):
    model = net()
    assert in_threads(lambda: (model(X).dtype, (X @ X.T).dtype)) == [(H, FP32)]
    for reentrant in (True, False):
        x = X.clone().requires_grad_()
        checkpoint(
            lambda x: model(x) @ torch.ones(16, 2), x, use_reentrant=reentrant
        ).sum().backward()
        assert x.grad is not None


def test_a_weight_is_cast_once_in_a_forward(session):
    net(lambda self, x: self.layer(self.layer(x)))(X)
    assert session.policies.cache.misses == 2  # weight and bias


@pytest.mark.parametrize("function", [False, True], ids=["a model", "a function"])
def test_compiled(session, function):
    model = net()
    call = (lambda x: model(x)) if function else model
    compiled = torch.compile(call, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(X), model(X), atol=0.3, rtol=0.05)
        assert compiled(X).dtype is H
    torch.compiler.reset()


@pytest.mark.parametrize(
    "step",
    [lambda loss, x: loss.backward(), lambda loss, x: torch.autograd.grad(loss, x)],
    ids=["backward", "grad"],
)
@pytest.mark.parametrize("asked", [{}, {"dtype": H}], ids=["float16", "bfloat16"])
def test_a_script_that_trains_bare_tensors_hears_that_nothing_is_cast(step, asked, caplog):
    auto.start(asked)
    bare = torch.ones(16, 4, requires_grad=True)
    for _ in range(2):
        step((X @ bare).pow(2).mean(), bare)
    [told] = [record.getMessage() for record in caplog.records]
    assert "nothing is cast" in told and "nn.Parameters of a module" in told
    ampatch.deactivate()


@pytest.mark.parametrize("holder", [net, lambda: nn.Parameter(torch.ones(16, 4))])
def test_nobody_else_hears_it(session, holder, caplog):
    held = holder()
    (held(X) if isinstance(held, nn.Module) else X @ held).sum().backward()
    assert caplog.records == []
