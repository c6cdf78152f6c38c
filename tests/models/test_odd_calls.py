"""Models, layers and parameters where a tree of modules does not show them, beside FP32."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from small_training import Made, data, step
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import ampatch

HALF = torch.bfloat16
LEVELS = ["O1", "O2", "O3"]


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def train(make, level, steps=3, loss_of=None, change=None):
    """The losses and final weights of a training; `make` gives a model, and models it calls."""
    models = make()
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
    if level != "FP32":
        settings = {"dtype": HALF, "opt_level": level, "verbosity": 0, "loss_scale": 1.0}
        ampatch.initialize(models[0], optimizer, **settings)
        if models[1:]:
            ampatch.initialize(list(models[1:]), **settings)
    if change is not None:
        change(models[0])
    found = []
    for number in range(steps):
        x, y = data(number)
        loss = loss_of(models[0], x, y) if loss_of else F.mse_loss(models[0](x)[:, :2].float(), y)
        found.append(loss.detach())
        if level == "FP32":
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            step(loss, optimizer)
    found += [parameter.detach().float() for parameter in models[0].parameters()]
    ampatch.deactivate()
    return found


def is_as_float(level, make, **settings):
    expected = train(make, "FP32", **settings)
    found = train(make, level, **settings)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.05, atol=0.05)
    return True


def with_a_teacher(how, checkpointed=False):
    def forward(self, x):
        teacher = self.teachers[0] if how == "list" else self.teachers()

        def run(x):
            return self.head(self.body(x) + teacher(x))

        return checkpoint(run, x, use_reentrant=False) if checkpointed else run(x)

    def make():
        teacher = net(1)
        student = Made(forward, body=net(), head=nn.Linear(4, 4))
        student.teachers = [teacher] if how == "list" else lambda: teacher
        return student, teacher

    return make


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ["list", "closure"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_managed_model_that_another_one_calls(level, how, checkpointed):
    """It is no part of the other; what it returns has the dtype that the other computes in."""
    assert is_as_float(level, with_a_teacher(how, checkpointed))


@pytest.mark.parametrize("inner", LEVELS)
@pytest.mark.parametrize("level", LEVELS)
def test_models_of_two_levels(level, inner):
    student, teacher = with_a_teacher("list")()
    expected = copy.deepcopy(student)
    expected.teachers = [copy.deepcopy(teacher)]
    x = data()[0]
    expected = expected(x)
    ampatch.initialize(student, opt_level=level, dtype=HALF, verbosity=0)
    ampatch.initialize(teacher, opt_level=inner, dtype=HALF, verbosity=0)
    torch.testing.assert_close(student(x).float(), expected, rtol=0.05, atol=0.05)
    assert teacher(x).dtype is (HALF if inner == "O1" else torch.float32)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_part_of_another_model(level):
    """`teacher.encoder(x)` in the forward of a model that does not have it."""
    teacher = net(1)
    student = Made(lambda self, x: self.head(teacher[0](x)), head=nn.Linear(8, 2))
    ampatch.initialize([student, teacher], opt_level=level, dtype=HALF, verbosity=0)
    assert student(data()[0]).dtype is torch.float32
    outside = torch.float32 if level == "O2" else HALF
    assert teacher[0](data()[0]).dtype is outside


@pytest.mark.parametrize("level", LEVELS)
def test_a_float_part_that_calls_a_managed_model(level):
    teacher = net(1)
    student = Made(lambda self, x: self.body(x), body=Made(lambda self, x: self.lin(teacher(x))))
    student.body.lin = nn.Linear(4, 2)
    rule = {"body": "float"}
    ampatch.initialize(student, opt_level=level, dtype=HALF, verbosity=0, overrides=rule)
    ampatch.initialize(teacher, opt_level=level, dtype=HALF, verbosity=0)
    assert student(data()[0]).isfinite().all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "put",
    [
        lambda model, layer: model.insert(1, layer),
        lambda model, layer: model._modules.update({"1": layer}),
    ],
)
def test_layers_that_are_put_in_without_registration(level, put):
    def change(model):
        torch.manual_seed(5)
        put(model, nn.Linear(8, 8))

    assert is_as_float(level, lambda: (net(),), change=change)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_shallow_copy_of_a_part_computes(level):
    model = net()
    x = data(0)[0]
    expected = model[0](x)
    ampatch.initialize(model, opt_level=level, dtype=HALF, verbosity=0)
    torch.testing.assert_close(copy.copy(model[0])(x).float(), expected, atol=0.05, rtol=0.05)
    assert model[0](x).dtype is (HALF if level == "O1" else torch.float32)


@pytest.mark.parametrize("level", LEVELS)
def test_a_parameter_that_is_put_in_a_table_is_computed_with_and_trained(level):
    """As `Module._apply` and `functional_call` do it: no registration tells of it."""

    def loss_of(model, x, y):
        if next(numbers) == 1:
            model[0]._parameters["weight"] = nn.Parameter(torch.linspace(-1, 1, 32).view(8, 4))
        return F.mse_loss(model(x)[:, :2].float(), y)

    found = []
    for one in ("FP32", level):
        model, numbers = net(), iter(range(3))
        found.append(train(lambda model=model: (model,), one, loss_of=loss_of))
        found[-1].append(model[0].weight.grad.float())
    for ours, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.02)
    assert found[1][-1].abs().sum() > 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_layer_from_outside(level, reentrant):
    def loss_of(model, x, y):
        hidden = checkpoint(model[0], x.clone().requires_grad_(), use_reentrant=reentrant)
        return F.mse_loss(model[2](torch.tanh(hidden))[:, :2].float(), y)

    assert is_as_float(level, lambda: (net(),), loss_of=loss_of)


@pytest.mark.parametrize("level", LEVELS)
def test_parametrize_cached_around_a_penalty_and_the_forward(level):
    class Positive(nn.Module):
        def forward(self, weight):
            return weight.abs() * weight

    def make():
        model = net()
        parametrize.register_parametrization(model[0], "weight", Positive())
        return (model,)

    def loss_of(model, x, y):
        with parametrize.cached():
            penalty = model[0].weight.square().mean()
            return F.mse_loss(model(x)[:, :2].float(), y) + penalty + model[0].weight.mean()

    assert is_as_float(level, make, loss_of=loss_of)
