"""Situations: torch's functions under O1, given mixed dtypes.  Who sees calls: tests/casting."""

import contextlib

import torch
import torch.nn.functional as F
from situations import Block, batches, mlp, mse, situation
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


def mixed(amp, x, *others):
    """Half tensors, as a cast product leaves them; the oracle widens them by hand."""
    return [t.to(amp.half).float() if amp.by_hand else t.to(amp.half) for t in (x, *others)]


def assigned(x, index, value):
    x[index] = value
    return x


MIXED = {
    "index_add": lambda x, h, i, m: x.index_add(0, i, h),
    "index_add_": lambda x, h, i, m: x.clone().index_add_(0, i, h),
    "index_put_": lambda x, h, i, m: x.clone().index_put_((i,), h),
    "assignment": lambda x, h, i, m: assigned(x.clone(), i, h),
    "scatter": lambda x, h, i, m: x.scatter(0, i[:, None].expand(6, 4), h),
    "scatter_add": lambda x, h, i, m: x.scatter_add(0, i[:, None].expand(6, 4), h),
    "scatter_reduce": lambda x, h, i, m: x.scatter_reduce(0, i[:, None].expand(6, 4), h, "sum"),
    "masked_scatter": lambda x, h, i, m: x.masked_scatter(m, h),
    "index_copy": lambda x, h, i, m: x.index_copy(0, i, h),
    "lerp": lambda x, h, i, m: torch.lerp(x, h, 0.25),
    "lerp_weight": lambda x, h, i, m: torch.lerp(x, x * 2, h),
    "where": lambda x, h, i, m: torch.where(m, x, h),
    "cat": lambda x, h, i, m: torch.cat([x, h]),
    "cross": lambda x, h, i, m: torch.cross(x[:, :3], h[:, :3], dim=1),
}


IN_FP32 = {
    "fft": lambda h: torch.fft.rfft(h).abs(),
    "ifft": lambda h: torch.fft.irfft(torch.fft.rfft(h)),
    "svd": lambda h: torch.linalg.svdvals(h),
    "qr": lambda h: torch.linalg.qr(h)[1].abs(),
    "inv": lambda h: torch.linalg.inv(h),
    "det": lambda h: torch.linalg.det(h),
    "solve": lambda h: torch.linalg.solve(h, h[:, :1]),
    "cholesky": lambda h: torch.linalg.cholesky(h),
    "norm": lambda h: torch.linalg.norm(h),
}


@situation("O1")
def mixed_dtypes_and_functions_that_half_cannot_compute(amp):
    """What is recorded after each loss is in the order of `MIXED` and `IN_FP32`."""
    model, optimizer = amp.start(mlp())
    index = torch.tensor([2, 0, 1, 5, 4, 3])
    words = torch.tensor([[0, 1, 2, 3]] * 6)
    table = nn.Parameter(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)))
    for x, y in batches(3):
        amp.step(mse(model(x), y), optimizer)
        (h,) = mixed(amp, x * 3)
        amp.record(*[function(x, h, index, x > 0) for function in MIXED.values()])
        (h,) = mixed(amp, x[:4] + 16 * torch.eye(4))
        amp.record(*[function(h).float() for function in IN_FP32.values()])
        (h,) = mixed(amp, x)
        with amp.no_casts() if amp.by_hand else amp.casts():
            amp.record(F.embedding_bag(words, table, per_sample_weights=h, mode="sum"))


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
