"""Models, layers and optimizers that calls of `initialize` share at O2: a weight stays one weight.

The oracle is O2 with torch's own means: `functional_call` on half copies of FP32 weights.
"""

import pytest
import torch
from small_training import step
from torch import nn
from torch.func import functional_call

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


def by_hand(model):
    copies = {name: weight.to(HALF) for name, weight in model.named_parameters()}
    return functional_call(model, copies, (INPUTS.to(HALF),), tie_weights=False).float()


def train(models, optimizers, call=lambda model: model(INPUTS), with_ampatch=True):
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = call(model).square().mean()
            if with_ampatch:
                step(loss, optimizer)
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [p.detach().clone() for model in models for p in model.parameters()]


def one_model_two_optimizers():
    model = Net()
    parts = model.encoder, model.head
    return [model, model], [sgd(part) for part in parts]


def two_models_one_optimizer():
    models = [Net(0), Net(1)]
    return models, [sgd(*models)] * 2


def shared_layer():
    first = Net(0)
    models = [first, Net(1, encoder=first.encoder)]
    return models, [sgd(models[0]), sgd(models[1].head)]


def shared_layer_and_optimizer():
    (first, second), _ = shared_layer()
    return [first, second], [sgd(first, second)] * 2


def inner_and_outer():
    inner = Net(0)
    outer = nn.Sequential(inner, nn.Tanh(), nn.Linear(2, 2))
    return [inner, outer], [sgd(inner), sgd(outer[2])]


MAKERS = [
    *(one_model_two_optimizers, two_models_one_optimizer, shared_layer),
    *(shared_layer_and_optimizer, inner_and_outer),
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("order", [(1, 0), (0, 1, 0, 1)])
def test_two_calls_of_initialize_and_the_same_again(make, order):
    """Objects stay the same; weights are FP32, after `deactivate` too."""
    expected = train(*make(), call=by_hand, with_ampatch=False)
    models, optimizers = make()
    before = [p for model in models for p in model.parameters()]
    for index in order:
        initialize(models[index], optimizers[index])
    actual = train(models, optimizers)
    for _ in range(2):
        after = [p for model in models for p in model.parameters()]
        assert all(a is b for a, b in zip(before, after, strict=True))
        assert {p.dtype for p in after} == {torch.float32}
        owned = [
            p
            for optimizer in optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        assert {id(p) for p in owned} <= set(map(id, after))
        assert all(map(torch.equal, actual, expected))
        assert all(map(torch.equal, actual, [p.detach() for p in after]))
        ampatch.deactivate()


def test_an_encoder_that_was_trained_first_joins_a_larger_model():
    """No casts between the two; by itself it has FP32 results."""
    encoder = Net()
    optimizer = sgd(encoder)
    initialize(encoder, optimizer)
    train([encoder], [optimizer])
    larger = Net(1, encoder=encoder)
    larger.head = nn.Linear(2, 2)
    of_head = sgd(larger.head)
    initialize(larger, of_head)
    train([larger, larger], [optimizer, of_head])
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
