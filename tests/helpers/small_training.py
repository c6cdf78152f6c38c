"""Small models, their batches, their FP32 gradients, and steps through `scale_loss`."""

import threading

import torch
import torch.nn.functional as F
from torch import nn

import ampatch


def seeded(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def data(seed=1, rows=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 2, generator=generator)


def start(level, kind=torch.optim.SGD, dtype=torch.float16, seed=0, options=None, **settings):
    model = seeded(seed)
    optimizer = kind(model.parameters(), **(options or {"lr": 0.1}))
    settings = {"verbosity": 0, "init_scale": 1024.0, **settings}
    ampatch.initialize(model, optimizer, opt_level=level, dtype=dtype, **settings)
    return model, optimizer


def managed(model, level, dtype=torch.bfloat16, kind=torch.optim.SGD, lr=0.1, **settings):
    optimizer = kind(model.parameters(), lr=lr)
    settings = {"verbosity": 0, **settings}
    ampatch.initialize(model, optimizer, opt_level=level, dtype=dtype, **settings)
    return model, optimizer


def pass_back(loss, optimizers, *args, **options):
    """A `scale_loss` block with the backward pass of the loss."""
    with ampatch.scale_loss(loss, optimizers, *args, **options) as scaled:
        scaled.backward()


def step(loss, optimizer):
    optimizer.zero_grad()
    pass_back(loss, optimizer)
    optimizer.step()


def with_norms(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Linear(4, 2))
    model.register_buffer("offset", torch.randn(2))
    return model


def train_with_norms(model, optimizer, steps=3):
    for _ in range(steps):
        step(model(torch.randn(8, 3)).float().square().mean(), optimizer)


def dtypes(model):
    return {name: t.dtype for name, t in (*model.named_parameters(), *model.named_buffers())}


class Made(nn.Module):
    """Parts by name, and what the forward does: `Made(lambda self, x: self.a(x), a=layer)`."""

    def __init__(self, does, **parts):
        super().__init__()
        self.does = does
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.does(self, *args, **kwargs)


class Net(nn.Module):
    """Notes the dtypes that its forward sees; calls `inside` there."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.inside = lambda model: None
        self.seen = []

    def encode(self, x):
        return torch.tanh(self.first(x))

    def forward(self, x):
        self.seen += [self.first.weight.dtype, x.dtype]
        hidden = self.encode(x)
        self.inside(self)
        return self.second(hidden)


class InBackward(torch.autograd.Function):
    """Its backward makes a call, as solvers of adjoint equations do."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad, None


def in_threads(*calls):
    """What each call returns, or its error; each in a thread of its own, all at once."""
    results, start = [None] * len(calls), threading.Barrier(len(calls), timeout=60)

    def work(index, call):
        try:
            start.wait()
            results[index] = call()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=numbered) for numbered in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def backward(model, optimizer, batch, factor=1.0, **options):
    loss = F.mse_loss(model(batch[0]), batch[1]) * factor
    pass_back(loss, optimizer, **options)
    return loss


def grads(optimizer):
    return [param.grad for param in ampatch.master_params(optimizer)]


def train(model, optimizer, batch=None, factor=1.0, **options):
    optimizer.zero_grad()
    loss = backward(model, optimizer, batch or data(), factor, **options)
    optimizer.step()
    return loss.item()


def values(optimizer):
    return [param.detach().clone() for param in ampatch.master_params(optimizer)]


def float_grads(*batches, seed=0, factors=None):
    """The FP32 run's gradients of the sum of the losses."""
    model = seeded(seed)
    for batch, factor in zip(batches, factors or [1.0] * len(batches), strict=True):
        (F.mse_loss(model(batch[0]), batch[1]) * factor).backward()
    return [param.grad for param in model.parameters()]


def everything(model, optimizer):
    results = [*model.parameters(), *model.buffers(), *ampatch.master_params(optimizer)]
    for state in optimizer.state.values():
        results += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in results]


def same(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


def close(first, second, dtype=torch.float16):
    tolerance = 4e-3 if dtype is torch.float16 else 3e-2
    return len(first) == len(second) and all(
        torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance)
        for a, b in zip(first, second, strict=True)
    )
