"""Situations: dtypes of models, buffers, inputs and state dicts, before and after `initialize`."""

from functools import partial

import torch
from situations import PLAIN, Block, batches, mlp, mse, situation, trained
from torch import nn


class Doubles(nn.Module):
    """An FP64 part: a physics term, with its own weights, buffer and input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 2)
        self.exact = nn.Linear(4, 2).double()
        self.register_buffer("offset", torch.full((2,), 1 + 2.0**-40, dtype=torch.float64))

    def forward(self, x, exact):
        assert exact.dtype is self.offset.dtype is self.exact.weight.dtype is torch.float64
        return self.body(x).double() + self.exact(exact) * self.offset


@situation()
def float64_is_never_touched(amp):
    model, optimizer = amp.start(Doubles())
    for x, y in batches(3):
        out = model(x, x.double() * (1 + 2.0**-40))
        amp.step((out.double() - y).square().mean(), optimizer)
        amp.record(model.offset)


@situation()
def the_state_dict_after_initialize_is_the_one_before(amp):
    net = nn.Sequential(
        mlp(norm=True),
        nn.Linear(2, 4),
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        nn.Linear(4, 2),
    )
    net.register_buffer("table", torch.linspace(0, 1, 7))
    net.register_buffer("huge", torch.tensor([1.7e9, 1e6, -1e9]))
    kept = [name for name, _ in net.named_buffers()]
    if amp.level != "O3":
        kept += [name for name, _ in net.named_parameters()]
    before = {key: value.clone() for key, value in net.state_dict().items()}
    model, _optimizer = amp.start(net)
    amp.record(*[(before if amp.by_hand else model.state_dict())[name] for name in kept])
    with torch.no_grad():
        net[1].weight.add_(1)


class Counter(Block):
    """Buffers that half cannot hold: a step count, a large constant, a mask of -1e9."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(70001.0))
        self.register_buffer("mask", torch.tensor([0.0, -1e9, 0.0, -1e9]))
        self.register_buffer("timestamp", torch.tensor(1.7e9))

    def forward(self, x):
        self.count += 1
        scores = self.first(x) + self.mask
        return self.head(torch.softmax(scores.float(), -1).to(self.head.weight.dtype))


@situation("O2 O3", against="FP32", within=2e-2)
def buffers_that_half_cannot_hold(amp):
    """In float16 the count is inf and the mask -inf; in bfloat16 the count stands still."""
    model, optimizer = amp.start(Counter(), PLAIN)
    for x, y in batches(3):
        out = model(x)
        amp.record(model.count - 70000, model.timestamp / 1e9)
        amp.step(mse(out, y), optimizer)
    amp.record(model.state_dict()["count"] - 70000)
    with torch.no_grad():
        for value in (model.count, model.mask, model.timestamp):
            value.zero_()


class Rotary(Block):
    """Angles of some hundred radians from an FP32 table: in bfloat16 0.731 is 2e-3 off, and a
    position of 1000 turns by two radians more."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequency", torch.tensor([1.0, 0.731, 0.0123, 0.00217]))

    def forward(self, x, position):
        angle = position.float()[:, None] * self.frequency.float()
        return self.head(self.first(x) * torch.sin(angle).to(x.dtype))


class Times(Block):
    """Timestamps: in float16 they are inf, in bfloat16 all the same."""

    def forward(self, x, time):
        phase = ((time - 1.7e9) / 1000).to(x.dtype)
        return super().forward(x * phase[:, None])


class Masked(Block):
    """A row that is masked throughout is uniform in FP32, and NaN where -1e9 became -inf."""

    def forward(self, x, mask):
        weights = torch.softmax(self.first(x) + mask, -1)
        return self.head(weights.to(x.dtype))


def masks(number):
    mask = torch.zeros(6, 4)
    mask[0], mask[1, :2] = -1e9, -1e9
    return mask


@situation(
    "O2 O3",
    against="FP32",
    within=3e-2,
    cases={
        "integer_positions": (Rotary, lambda number: torch.arange(6) + 1000 * number),
        "timestamps": (Times, lambda number: 1.7e9 + 128.0 * torch.arange(6)),
        "masks_of_minus_1e9": (Masked, masks),
    },
)
def inputs_that_half_cannot_hold(amp, case):
    kind, beside = case
    model, optimizer = amp.start(kind(), PLAIN)
    for number, (x, y) in enumerate(batches(3)):
        amp.step(mse(model(x, beside(number)), y), optimizer)


@situation("O2", against="FP32", within=3e-2)
def running_statistics_of_instance_norm(amp):
    """Momentum 1e-4: in half the statistics would stand still at 1, where they end at 0.97."""
    net = nn.Sequential(
        nn.Linear(4, 8),
        nn.Unflatten(1, (2, 4)),
        nn.InstanceNorm1d(2, momentum=1e-4, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(8, 2),
    )
    model, _ = trained(amp, net, partial(torch.optim.SGD, lr=1e-3), 20)
    amp.record((model[2].running_var - 1) * 1000)
