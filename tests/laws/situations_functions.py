"""Situations: torch's functions under O1, where dtypes are mixed.  More: tests/casting."""

import contextlib

import torch
import torch.nn.functional as F
from situations import Block, batches, mlp, mse, situation, trained
from torch import nn
from torch.nn.attention.bias import causal_lower_right


class Causal(Block):
    def forward(self, x):
        q, k, v = (layer(x)[None, None] for layer in (self.first, self.second, self.first))
        out = F.scaled_dot_product_attention(
            q[:, :, -3:], k, v, attn_mask=causal_lower_right(3, x.shape[0])
        )
        return self.head(out[0, 0])


@situation("O1 O2", against="FP32", within=2e-2)
def causal_lower_right_bias(amp):
    """Without the bias the loss is wrong by a factor of two."""
    model, optimizer = amp.start(Causal())
    for x, y in batches(3):
        amp.step(mse(model(x), y[:3]), optimizer)


@situation("O1")
def an_embedding_bag_of_fp32_with_half_weights_of_its_samples(amp):
    trained(amp)
    words = torch.tensor([[0, 1, 2, 3]] * 6)
    table = nn.Parameter(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)))
    for x, _ in batches(3):
        shares = x.to(amp.half).float() if amp.by_hand else x.to(amp.half)
        amp.record(F.embedding_bag(words, table, per_sample_weights=shares, mode="sum"))


@contextlib.contextmanager
def float64_by_default():
    was = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(was)


@situation(cases={"fp32": (torch.float32, {}), "fp64": (torch.float64, {"loss_scale": 1.0})})
@float64_by_default()
def a_default_dtype_of_float64_and_a_model_of(amp, case):
    dtype, settings = case
    model, optimizer = amp.start(mlp().to(dtype), **settings)
    for x, y in batches(3):
        amp.step((model(x.to(dtype)) - y.to(dtype)).square().mean(), optimizer)
