"""Training loops as a script would write them, run under FP32 and under `--auto`.

Static scales are powers of two, so in bfloat16 at a scale, and wherever the model computes in FP64,
results can be compared closely.
"""

import torch
from torch import nn

import ampatch
from ampatch import auto

SCALE = 2.0**10


AT_SCALE = {"loss_scale": SCALE}


def begin(asked=AT_SCALE):
    """`--auto`, at a scale of `SCALE` in any case."""
    session = auto.start(asked)
    session.scalers[0].set(SCALE)
    return session


def both(loop, asked=AT_SCALE):
    """What `loop()` gives in FP32 and under `--auto`, from the same seed."""
    torch.manual_seed(0)
    expected = loop()
    begin(asked)
    torch.manual_seed(0)
    actual = loop()
    ampatch.deactivate()
    return expected, actual


def close(expected, actual, atol=2e-3, rtol=2e-2):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def net(width=8):
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


def batch(size=16):
    x = torch.randn(size, 4)
    return x, x.sum(1, keepdim=True)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def grads(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]
