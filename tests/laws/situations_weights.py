"""Situations: weights that are written by hand, swapped and stepped around."""

from __future__ import annotations

import copy
from functools import partial

import torch
from drivers import SGD
from situations import Block, batches, mlp, mse, plain_loop, situation
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

PLAIN = partial(torch.optim.SGD, lr=0.1)


def write_between_steps(amp, write, count=3, make=SGD):
    """A step, a write, a forward, and so on."""
    model, optimizer = amp.start(mlp(), make)
    for x, y in batches(count):
        amp.step(mse(model(x), y), optimizer)
        write(model)
        with torch.no_grad():
            amp.record(model(x))


@situation(letter="j")
def a_mask_by_data_mul(amp):
    """Pruning by hand; a master that goes on unmasked grows back at once."""

    def write(model):
        model[0].weight.data.mul_(torch.eye(8)[:, :4])

    write_between_steps(amp, write)


@situation(letter="j")
def clamp_by_data_after_each_step(amp):
    """WGAN's weight clipping."""

    def write(model):
        for p in model.parameters():
            p.data.clamp_(-0.1, 0.1)

    write_between_steps(amp, write)


@situation(letter="j")
def data_is_replaced(amp):
    def write(model):
        for p in model.parameters():
            p.data = p.data * 0.5

    write_between_steps(amp, write)


@situation(letter="j")
def vector_to_parameters_and_back(amp):
    def write(model):
        vector_to_parameters(parameters_to_vector(model.parameters()) * 0.5, model.parameters())

    write_between_steps(amp, write)


@situation(letter="j")
def a_write_before_the_first_step(amp):
    model, optimizer = amp.start(mlp())
    for p in model.parameters():
        p.data.mul_(0.5)
    plain_loop(amp, model, optimizer)


@situation(letter="j")
def a_write_between_forward_and_step(amp):
    model, optimizer = amp.start(mlp())
    for x, y in batches(3):
        optimizer.zero_grad()
        amp.backward(mse(model(x), y), optimizer)
        model[0].weight.data[0].zero_()
        optimizer.step()
        amp.record(model.state_dict()["0.weight"])


@situation(letter="j")
def a_write_through_a_flat_view(amp):
    """As collectives write: into memory, without a version."""

    def write(model):
        flat = model[2].weight.detach().view(-1)
        flat.data[::3] = 0.25

    write_between_steps(amp, write)


@situation(letter="j")
def a_write_seen_by_the_state_dict(amp):
    model, optimizer = amp.start(mlp())
    plain_loop(amp, model, optimizer, 1)
    model[0].bias.data.fill_(0.3)
    amp.record(model.state_dict()["0.bias"], copy.deepcopy(model).state_dict()["0.bias"])
    plain_loop(amp, model, optimizer, 1)


@situation()
def writes_under_no_grad(amp):
    @torch.no_grad()
    def write(model):
        nn.init.constant_(model[0].bias, 0.2)
        model[2].weight.copy_(model[2].weight * 0.5)
        model[2].bias.add_(1)

    write_between_steps(amp, write)


@situation(letter="j")
def spectral_clipping_by_svd(amp):
    def write(model):
        u, s, v = torch.linalg.svd(model[0].weight.data.float(), full_matrices=False)
        with amp.no_casts():
            model[0].weight.data.copy_(u @ torch.diag(s.clamp(max=0.4)) @ v)

    write_between_steps(amp, write)


def swapped(model, values):
    """Put other values into the weights by `.data`; returns what was there."""
    was = [p.data.clone() for p in model.parameters()]
    for p, value in zip(model.parameters(), values):
        p.data.copy_(value)
    return was


@situation(letter="b")
def weights_swapped_for_an_evaluation(amp):
    """EMA weights put in for a validation and taken out again: the weights are what they were."""
    model, optimizer = amp.start(mlp())
    mean = [p.data.float().clone() for p in model.parameters()]
    for x, y in batches(4):
        amp.step(mse(model(x), y), optimizer)
        for value, p in zip(mean, model.parameters()):
            value.lerp_(p.data.float(), 0.1)
        was = swapped(model, mean)
        with torch.no_grad():
            amp.record(model(x))
        swapped(model, was)


@situation("O1", letter="b")
def weights_swapped_while_a_graph_waits(amp):
    """Today's gradients are off up to 10 times."""
    model, optimizer = amp.start(mlp())
    for x, y in batches(4):
        optimizer.zero_grad()
        loss = mse(model(x), y)
        was = swapped(model, [p.data * 5 for p in model.parameters()])
        with torch.no_grad():
            amp.record(model(x))
        swapped(model, was)
        amp.backward(loss, optimizer)
        optimizer.step()


@situation("O1", letter="b")
def sam_by_data_around_a_waiting_graph(amp):
    model, optimizer = amp.start(mlp())
    for x, y in batches(4):
        optimizer.zero_grad()
        loss = mse(model(x), y)
        was = [p.data.clone() for p in model.parameters()]
        for p in model.parameters():
            p.data.add_(torch.sign(p.data), alpha=0.5)
        with torch.no_grad():
            model(-x)
        other = mse(model(x), y)
        swapped(model, was)
        amp.backward(loss + other, optimizer)
        optimizer.step()


@situation()
def sam_by_hand(amp):
    """Ascend by the gradient, take the gradient there, go back, step."""
    model, optimizer = amp.start(mlp(), PLAIN)
    for x, y in batches(4):
        amp_params = list(optimizer.param_groups[0]["params"])
        optimizer.zero_grad()
        amp.backward(mse(model(x), y), optimizer)
        with torch.no_grad():
            was = [p.clone() for p in amp_params]
            for p in amp_params:
                p.add_(p.grad, alpha=0.3)
        optimizer.zero_grad()
        amp.backward(mse(model(x), y), optimizer)
        with torch.no_grad():
            for p, value in zip(amp_params, was):
                p.copy_(value)
        optimizer.step()


class NonNegative(nn.Module):
    """Clamps its own weight in its forward, after an earlier use of it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = torch.tanh(self.layer(x))
        self.layer.weight.data.clamp_(min=0)
        return self.head(torch.tanh(self.layer(x)))


@situation("O1", letter="e", against="FP32", within=2e-2)
def clamp_by_data_within_the_forward(amp):
    """Autocast's own cache is stale here: 0.16 away from FP32."""
    model, optimizer = amp.start(NonNegative())
    for x, _ in batches(4):
        with torch.no_grad():
            amp.record(model(x))
    plain_loop(amp, model, optimizer)


@situation(letter="e")
def clamp_by_data_before_the_use_in_a_forward(amp):
    class First(Block):
        def forward(self, x):
            self.first.weight.data.clamp_(min=0)
            return super().forward(x)

    model, optimizer = amp.start(First())
    plain_loop(amp, model, optimizer, 4)


@situation("O1 O2", letter="l")
def writes_to_masters_outside_of_step(amp):
    model, optimizer = amp.start(mlp())
    for x, y in batches(4):
        amp.step(mse(model(x), y), optimizer)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.mul_(0.9)
            amp.record(model(x))
        for p in optimizer.param_groups[0]["params"]:
            p.data.add_(0.01)
        with torch.no_grad():
            amp.record(model(x))


@situation("O1 O2", letter="l")
def a_write_to_a_master_before_the_first_step(amp):
    model, optimizer = amp.start(mlp())
    for p in optimizer.param_groups[0]["params"]:
        p.data.mul_(0.5)
    plain_loop(amp, model, optimizer)


@situation("O1 O2", letter="l")
def schedule_free_modes(amp):
    """`eval()` and `train()` of the optimizer move its parameters between two points."""

    class ScheduleFree(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)

        @torch.no_grad()
        def eval(self):
            for p in self.param_groups[0]["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, 0.5)

        @torch.no_grad()
        def train(self):
            for p in self.param_groups[0]["params"]:
                p.lerp_(self.state[p]["z"], -1.0)

    model, optimizer = amp.start(mlp(), ScheduleFree)
    for x, y in batches(4):
        amp.step(mse(model(x), y), optimizer)
        optimizer.eval()
        with torch.no_grad():
            amp.record(model(x))
        optimizer.train()


@situation("O2")
def masters_swapped_for_an_evaluation(amp):
    """An EMA of the masters, put in by `.data =` and taken out again."""
    model, optimizer = amp.start(mlp())
    plain_loop(amp, model, optimizer, 1)
    masters = optimizer.param_groups[0]["params"]
    mean = [p.detach() * 0.5 for p in masters]
    for x, y in batches(3):
        was = [p.data for p in masters]
        for p, value in zip(masters, mean):
            p.data = value
        with torch.no_grad():
            amp.record(model(x))
        for p, value in zip(masters, was):
            p.data = value
        amp.step(mse(model(x), y), optimizer)
