"""A training whose faults in float16 are known.

    python examples/faults.py --fault softmax|sum|vanish|eps|two|none --seed N

`softmax`: logits beyond float16's range.  `sum`: a sum of 100,000 values.  `vanish`: a layer with
gradients of about 1e-12, and a learning rate to match.  `eps`: an Adam eps that float16 cannot
hold.  `two`: softmax and vanish.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import ampatch

SMALL = 1e-12
parser = argparse.ArgumentParser()
parser.add_argument("--fault", required=True)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=150)
asked = parser.parse_args()
faults = {"two": {"softmax", "vanish"}}.get(asked.fault, {asked.fault})
torch.set_num_threads(1)


class Small(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * SMALL


class Project(nn.Module):
    """To the two numbers that all else is computed from, so that it has to learn."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 2)

    def forward(self, x):
        x = self.linear(x)
        return Small.apply(x) if "vanish" in faults else x


class Weigh(nn.Module):
    def forward(self, x):
        return x + torch.softmax(x.detach() * (1e6 if "softmax" in faults else 1), -1)


class Total(nn.Module):
    def forward(self, x):
        if "sum" not in faults:
            return x
        many = (1 + x.mean(-1, keepdim=True).tanh().abs()).expand(-1, 100_000)
        return x + 1e-6 * many.sum(-1, keepdim=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.weigh, self.total = Project(), Weigh(), Total()
        self.grow = nn.Linear(2, 32)
        self.body = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        return self.body(self.total(self.weigh(F.relu(self.grow(self.project(x))))))


def batch(generator, size):
    x = torch.randn(size, 8, generator=generator)
    return x, 2 * (x[:, 0] + x[:, 1] > 0).long() + (x[:, 2] - x[:, 3] > 0).long()


torch.manual_seed(asked.seed)
model = Net()
rate = 0.1
groups = [
    {"params": model.project.parameters(), "lr": rate / (SMALL if "vanish" in faults else 1)},
    {"params": [p for name, p in model.named_parameters() if not name.startswith("project")]},
]
if "eps" in faults:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-8)
else:
    optimizer = torch.optim.SGD(groups, lr=rate)
model, optimizer = ampatch.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic")
generator = torch.Generator().manual_seed(asked.seed)
for _ in range(asked.steps):
    x, y = batch(generator, 64)
    loss = F.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    with ampatch.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
with torch.no_grad():
    x, y = batch(generator, 2000)
    ampatch.log_metrics(accuracy=(model(x).argmax(-1) == y).float().mean().item())
