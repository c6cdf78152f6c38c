"""Complex weights, as of spectral layers, under a loss scale: torch's kernel takes real numbers."""

import math

import pytest
import torch
from torch import Tensor, nn

import ampatch

pytestmark = pytest.mark.usefixtures("scale_lives_on")


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Parameter(torch.randn(6))
        self.modes = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.lazy = nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float() + self.bias
        x = torch.fft.irfft(torch.fft.rfft(x) * self.modes, n=6)
        return (x * self.lazy.conj()).abs()  # the gradient of `lazy` is conjugated lazily


def trained(level, factors, passes=1, foreach=False, **settings):
    """The weights after a step for each factor of the loss, and which steps were skipped."""
    model = Spectral()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=foreach)
    ampatch.initialize(model, optimizer, opt_level=level, verbosity=0, **settings)
    x, skipped = torch.randn(5, 6), []
    for factor in factors:
        optimizer.zero_grad()
        for _ in range(passes):
            with ampatch.scale_loss(model(x).mean() * factor, optimizer) as scaled_loss:
                scaled_loss.backward()
        assert model.lazy.grad.is_conj() or passes > 1
        optimizer.step()
        skipped.append(ampatch.step_was_skipped(optimizer))
    ampatch.deactivate()
    return [parameter.detach().clone() for parameter in model.parameters()], skipped


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("loss_scale", ["dynamic", 1024.0])
@pytest.mark.parametrize("passes", [1, 2])
def test_they_train_as_without_a_loss_scale(foreach, loss_scale, passes):
    plain, _ = trained("O1", [1.0] * 4, passes, foreach, enabled=False)
    settings = {"loss_scale": loss_scale, "init_scale": 1024.0}
    weights, skipped = trained("O1", [1.0] * 4, passes, foreach, **settings)
    assert skipped == [False] * 4
    for ours, other in zip(weights, plain, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_they_keep_their_dtype_and_an_overflow_in_them_skips_the_step(level):
    weights, skipped = trained(level, [1.0, math.inf, 1.0], init_scale=16.0)
    assert [weight.dtype.is_complex for weight in weights] == [False, True, True]
    assert skipped == [False, True, False]
    assert all(torch.isfinite(weight).all() for weight in weights)


@pytest.mark.parametrize("number", [complex(0, math.inf), complex(math.nan, 0)])
def test_an_overflow_in_one_part_is_one(number):
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    real = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([real, weight], lr=1.0)
    ampatch.initialize([], optimizer, opt_level="O1", verbosity=0)
    with ampatch.scale_loss(real.sum() + weight.abs().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        weight.grad[1] = number
    optimizer.step()
    assert ampatch.step_was_skipped(optimizer)
    assert weight.tolist() == [1] * 3 and real.tolist() == [1, 1]
