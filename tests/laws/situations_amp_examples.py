"""Situations: PyTorch's page of AMP examples, and what its readers do next."""

import math
from functools import partial

import torch
from situations import Block, batches, mlp, mse, network, situation, trained
from torch import nn
from torch.amp import custom_bwd, custom_fwd
from torch.utils.checkpoint import checkpoint


@situation("O1 O2", halves="bf16")
def accumulation_by_plain_backward(amp):
    """256 equal gradients in bfloat16 sum to half of it at best: the weights end 50 % away."""
    model, optimizer = amp.start(mlp(), partial(torch.optim.SGD, lr=0.5))
    x, y = next(batches(1))
    for passes in (256, 1, 1):
        for _ in range(passes):
            amp.plain_backward(mse(model(x), y) / passes)
        optimizer.step()
        for p in model.parameters():
            p.grad = None


@situation()
def gradient_penalties_on_inputs(amp):
    """On weights: `programs.py`."""
    model, optimizer = amp.start(mlp())
    for x, y in batches(4):
        x.requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        amp.record(grad)
        amp.step(mse(out, y) + grad.norm(dim=1).sub(1).square().mean(), optimizer)


@situation("O1 O2")
def overflows_are_skipped(amp):
    """Alone, within an accumulation, and where clipping turns an inf into NaNs."""
    model, optimizer = amp.start(mlp(), loss_scale="dynamic")
    for bad, passes, clips in ((math.nan, 1, False), (math.inf, 2, False), (math.inf, 1, True)):
        for number, (x, y) in enumerate(batches(6)):
            amp.backward(mse(model(x), y) * (bad if number == 2 else 1.0), optimizer)
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if (number + 1) % passes == 0:
                optimizer.step()
                optimizer.zero_grad()
            amp.record(amp.scale())


def products(device):
    """`MyMM` of the page, and `MyFloat32Func`: its inputs come in FP32, it runs without casts."""

    class Product(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=device)
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a.mm(b)

        @staticmethod
        @custom_bwd(device_type=device)
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            return grad.mm(b.t()), a.t().mm(grad)

    class FloatProduct(Product):
        @staticmethod
        @custom_fwd(device_type=device, cast_inputs=torch.float32)
        def forward(ctx, a, b):
            assert a.dtype is b.dtype is torch.float32
            ctx.save_for_backward(a, b)
            return a.mm(b)

    return Product, FloatProduct


class Custom(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.body, self.head = mlp(0, 4)[:2], nn.Linear(3, 2)
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        return self.head(self.function.apply(self.body(x), self.weight))


@situation(cases={"custom_fwd_and_bwd": 0})
@situation("O1", cases={"inputs_cast_to_fp32": 1})
def a_function_with(amp, case):
    """In FP32: the product in half would be 4e-4 (float16) or 4e-3 away, and differ in bits."""
    trained(amp, Custom(products(amp.device)[case]))


class Island(nn.Module):
    """A rotary table and a loss in an FP32 island, as large models write it.

    Angles of 300 in half are off by 0.1 to 1: their sine is another one.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.body(x)
        with torch.autocast("cpu", enabled=False):
            angles = torch.matmul(x.float() * 300, torch.eye(4) / 3)
            x = self.inner(x.float()) * angles.sin()
        return self.head(x)


@situation("O1")
def an_island_without_autocast(amp):
    model, optimizer = trained(amp, Island())
    basis = torch.eye(2) * 1000.3
    for x, y in batches(4):
        out = model(x)
        with torch.autocast("cpu", enabled=False):
            loss = (torch.matmul(out.float() - y, basis) / 1000.3).square().mean()
        amp.step(loss, optimizer)


@network("O1")
class CheckpointedIsland(Island):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@situation("O1")
def an_autocast_region_in_another_half_dtype(amp):
    other = torch.bfloat16 if amp.half is torch.float16 else torch.float16

    class Inner(Block):
        def encode(self, x):
            with torch.autocast("cpu", dtype=other):
                x = self.first(x)
            assert x.dtype is other
            return torch.tanh(x)

    trained(amp, Inner())


@situation("O1")
def a_whole_loop_inside_autocast(amp):
    """A script that has both: autocast around the forward means what it means without us."""
    model, optimizer = amp.start(mlp())
    for x, y in batches(4):
        with torch.autocast("cpu", dtype=amp.half):
            out = model(x)
        amp.step(mse(out, y), optimizer)
