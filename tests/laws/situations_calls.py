"""Situations: models, layers and parameters where a tree of modules does not show them."""

import torch
from situations import PLAIN, batches, mlp, mse, plain_loop, situation, trained
from small_training import Made
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

CLOSE_TO_FP32 = {"against": "FP32", "within": 5e-2}


@situation(cases={"": False, "checkpointed": True}, **CLOSE_TO_FP32)
def a_managed_model_that_another_one_calls(amp, case):
    """It is no part of the other; what it returns has the dtype that the other computes in."""
    teacher = mlp(1)

    def forward(self, x):
        def run(x):
            return self.head(self.body(x) + self.teachers[0](x) + self.teacher()(x))

        return checkpoint(run, x, use_reentrant=False) if case else run(x)

    student = Made(forward, body=mlp(), head=nn.Linear(2, 2))
    student.teachers, student.teacher = [teacher], lambda: teacher
    (student, _), (optimizer, _) = amp.start([student, teacher], [PLAIN, None])
    plain_loop(amp, student, optimizer)


@situation(**CLOSE_TO_FP32)
def a_submodule_of_another_model_that_a_forward_calls(amp):
    teacher = mlp(1)
    student = Made(lambda self, x: self.head(teacher[0](x)), head=nn.Linear(8, 2))
    (student, _), (optimizer, _) = amp.start([student, teacher], [PLAIN, None])
    plain_loop(amp, student, optimizer)


@situation(**CLOSE_TO_FP32)
def a_managed_model_that_a_float_submodule_of_another_one_calls(amp):
    teacher = mlp(1)
    body = Made(lambda self, x: self.layer(teacher(x)), layer=nn.Linear(2, 2))
    student = Made(lambda self, x: self.body(x), body=body)
    (_, (optimizer, _)) = amp.start([student, teacher], [PLAIN, None], overrides={"body": "float"})
    plain_loop(amp, student, optimizer)


PUT = {
    "by_a_container": lambda model, layer: model.insert(1, layer),
    "in_the_table": lambda model, layer: model._modules.update({"1": layer}),
}


@situation(cases=PUT, **CLOSE_TO_FP32)
def a_layer_that_is_put_in_without_registration(amp, case):
    model, optimizer = amp.start(mlp(), PLAIN)
    case(model, nn.Linear(8, 8))
    plain_loop(amp, model, optimizer)


@situation(**CLOSE_TO_FP32)
def a_parameter_that_is_put_in_a_table(amp):
    """As `Module._apply` and `functional_call` do it: no registration tells of it."""
    model, optimizer = trained(amp, make=PLAIN, count=1)
    weight = nn.Parameter(torch.linspace(-1, 1, 32).view(8, 4))
    model[0]._parameters["weight"] = weight
    optimizer.add_param_group({"params": [weight]})
    plain_loop(amp, model, optimizer, 2)


@situation(cases={"": False, "reentrant": True}, **CLOSE_TO_FP32)
def a_checkpoint_around_a_layer_from_outside(amp, case):
    model, optimizer = amp.start(mlp(), PLAIN)
    for x, y in batches(3):
        hidden = checkpoint(model[0], x.requires_grad_(), use_reentrant=case)
        amp.step(mse(model[2](torch.tanh(hidden)), y), optimizer)


class Positive(nn.Module):
    def forward(self, weight):
        return weight.abs() * weight


@situation(**CLOSE_TO_FP32)
def parametrize_cached_around_a_penalty_and_the_forward(amp):
    net = mlp()
    parametrize.register_parametrization(net[0], "weight", Positive())
    model, optimizer = amp.start(net, PLAIN)
    for x, y in batches(3):
        with parametrize.cached():
            penalty = model[0].weight.square().mean()
            loss = mse(model(x), y) + penalty + model[0].weight.mean()
        amp.step(loss, optimizer)
