"""Layers that models of two calls of `initialize` share.

What calls share and train at O2: `laws/situations_parameters.py`.
"""

import pytest
import torch
from small_training import step
from torch import nn

import ampatch

HALF = torch.bfloat16
INPUTS = torch.linspace(-1, 1, 12).view(3, 4)


class Net(nn.Module):
    def __init__(self, seed=0, encoder=None):
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = nn.Linear(4, 8) if encoder is None else encoder
        self.head, self.seen = nn.Linear(8, 2), []

    def forward(self, x):
        hidden = self.encoder(x)
        self.seen.append(hidden.dtype)
        return self.head(torch.tanh(hidden))


def initialize(*args):
    ampatch.initialize(*args, opt_level="O2", dtype=HALF, verbosity=0)


def sgd(*models):
    weights = {id(p): p for model in models for p in model.parameters()}
    return torch.optim.SGD(weights.values(), lr=0.1, momentum=0.9)


def train(*models_and_optimizers):
    for _ in range(3):
        for model, optimizer in models_and_optimizers:
            step(model(INPUTS).square().mean(), optimizer)


def test_an_encoder_that_was_trained_first_joins_a_larger_model():
    """No casts between the two; by itself it has FP32 results."""
    encoder = Net()
    optimizer = sgd(encoder)
    initialize(encoder, optimizer)
    train((encoder, optimizer))
    larger = Net(1, encoder=encoder)
    larger.head = nn.Linear(2, 2)
    of_head = sgd(larger.head)
    initialize(larger, of_head)
    train((larger, optimizer), (larger, of_head))
    assert larger.seen == [HALF] * 6 and encoder(INPUTS).dtype is torch.float32
    assert optimizer.param_groups[0]["params"][0] is encoder.encoder.weight


@pytest.mark.parametrize("first", ["O2", "O3"])
def test_a_layer_shared_with_an_o3_teacher_stays_fp32(first, half):
    """In both orders: the student trains it in FP32, the teacher computes in half."""
    torch.manual_seed(0)
    shared = nn.Linear(4, 8)
    student = nn.Sequential(shared, nn.ReLU(), nn.Linear(8, 2))
    teacher = nn.Sequential(shared, nn.Tanh(), nn.Linear(8, 2)).requires_grad_(True)
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-3, momentum=0.9)
    settings = {"dtype": half, "verbosity": 0}

    def start(level):
        if level == "O2":
            ampatch.initialize(student, optimizer, opt_level="O2", loss_scale=64.0, **settings)
        else:
            ampatch.initialize(teacher, opt_level="O3", **settings)

    start(first)
    start("O3" if first == "O2" else "O2")
    assert [p.dtype for p in teacher.parameters()] == [torch.float32] * 2 + [half] * 2
    seen = []
    shared.register_forward_pre_hook(lambda m, args: seen.append((m.weight.dtype, args[0].dtype)))
    inputs = torch.randn(16, 4)
    for _ in range(3):
        with torch.no_grad():
            targets = teacher(inputs)
        step((student(inputs) - targets).square().mean(), optimizer)
    assert seen == [(half, half)] * 6
    assert not torch.equal(shared.weight, shared.weight.to(half).float())
    ampatch.deactivate()
    assert {p.dtype for p in (*student.parameters(), *teacher.parameters())} == {torch.float32}
