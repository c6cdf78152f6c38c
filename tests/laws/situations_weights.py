"""Situations: weights that are written by hand, swapped and stepped around."""

import copy

import torch
from situations import PLAIN, Block, batches, each, look, mlp, mse, plain_loop, situation, trained
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def for_each_weight(write):
    def change(amp, model):
        for p in model.parameters():
            write(p)

    return change


def replaced(p):
    p.data = p.data * 0.5


@torch.no_grad()
def written_under_no_grad(amp, model):
    nn.init.constant_(model[0].bias, 0.2)
    model[2].weight.copy_(model[2].weight * 0.5)
    model[2].bias.add_(1)


def clipped_by_svd(amp, model):
    u, s, v = torch.linalg.svd(model[0].weight.data.float(), full_matrices=False)
    with amp.no_casts():
        model[0].weight.data.copy_(u @ torch.diag(s.clamp(max=0.4)) @ v)


def loaded_and_clamped(amp, model):
    model.load_state_dict(mlp(3).state_dict())
    model[0].weight.data.clamp_(-0.1, 0.1)


def through_a_vector(amp, model):
    vector_to_parameters(parameters_to_vector(model.parameters()) * 0.5, model.parameters())


WRITES = {
    "a mask, as pruning by hand has it": lambda amp, model: model[0].weight.data.mul_(
        torch.eye(8)[:, :4]
    ),
    "a clamp, as WGAN has it": for_each_weight(lambda p: p.data.clamp_(-0.1, 0.1)),
    "data replaced": for_each_weight(replaced),
    "through a vector": through_a_vector,
    "through a flat view, as collectives write: without a version": lambda amp, model: (
        model[2].weight.detach().view(-1).data[::3].fill_(0.25)
    ),
    "under no_grad": written_under_no_grad,
    "clipped by svd": clipped_by_svd,
    "right after a checkpoint was loaded": loaded_and_clamped,
}


@situation()
def writes_between_steps(amp):
    """Before the first step too.  A state dict and a copy show them."""
    model, optimizer = amp.start(mlp())
    for write in each(amp, WRITES):
        for is_seen in (False, True):
            write(amp, model)
            if is_seen:
                look(amp, model)
            amp.record(*model.state_dict().values(), *copy.deepcopy(model).state_dict().values())
            plain_loop(amp, model, optimizer, 1)


def through_numpy(p):
    p.data.numpy()[...] *= 0.5
    p.detach().numpy()[...] += 0.25


def repaired(p):
    p.data[:1] = torch.nan
    p.data.nan_to_num_(0.1)


WAITED = {
    "numpy": through_numpy,
    "data": lambda p: p.data.mul_(1 - 0.1 * 0.01),
    "nan_to_num_": repaired,
}


@situation("O0 O1 O2", cases=WAITED)
def writes_while_a_graph_waits_by(amp, case):
    """And after the step, by what the graph does not notice."""
    model, optimizer = amp.start(mlp(), torch.optim.Adam)
    for x, y in batches(2):
        loss = mse(model(x), y)
        for_each_weight(case)(amp, model)
        look(amp, model)
        amp.record(*model.parameters())
        amp.step(loss, optimizer)
        for_each_weight(case)(amp, model)
        look(amp, model)
        amp.step(mse(model(x), y), optimizer)


def swapped(model, values):
    """Put other values into the weights by `.data`; returns what was there."""
    was = [p.data.clone() for p in model.parameters()]
    for p, value in zip(model.parameters(), values):
        p.data.copy_(value)
    return was


@situation("O1")
def weights_swapped_while_a_graph_waits(amp):
    """For an evaluation, and for a second loss, as SAM writes it.  Gradients were off 10 times."""
    model, optimizer = amp.start(mlp())
    for x, y in batches(4):
        loss = mse(model(x), y)
        was = swapped(model, [p.data * 5 for p in model.parameters()])
        look(amp, model, x)
        swapped(model, was)
        amp.step(loss, optimizer)
        loss = mse(model(x), y)
        was = swapped(model, [p.data + torch.sign(p.data) / 2 for p in model.parameters()])
        look(amp, model, -x)
        other = mse(model(x), y)
        swapped(model, was)
        amp.step(loss + other, optimizer)


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


@situation("O1", against="FP32", within=2e-2)
def clamp_by_data_within_the_forward(amp):
    """Autocast's own cache is stale here: 0.16 away from FP32."""
    model, optimizer = amp.start(NonNegative())
    for x, _ in batches(4):
        look(amp, model, x)
    plain_loop(amp, model, optimizer)


class WritesWhatItHolds(Block):
    """What `.data` gave is written into after the next use of the weight, too."""

    def forward(self, x):
        held = self.second.weight.data
        held.clamp_(min=0)
        x = self.second(x)
        held.add_(0.25)
        return self.head(self.second(x))


@situation("O1", against="FP32", within=2e-2)
def written_through_data_that_the_forward_holds(amp):
    """A stale copy is 0.4 away."""
    trained(amp, WritesWhatItHolds())


class FreezesItself(Block):
    def forward(self, x):
        self.turn = getattr(self, "turn", 0) + 1
        self.second.requires_grad_(self.turn in (2, 4, 5))
        return super().forward(x)


@situation("O0 O1")
def frozen_and_freed_within_the_forward(amp):
    model, optimizer = amp.start(FreezesItself(), PLAIN)
    for x, y in batches(6):
        amp.step(mse(model(x), y), optimizer)
        amp.record(*[param.grad is None for param in model.parameters()])


CLAMPS = {
    "by_data": (1, lambda weight: weight.data.clamp_(min=0)),
    "late_under_no_grad": (3, torch.no_grad()(lambda weight: weight.clamp_(min=0))),
}


@situation(cases=CLAMPS)
def clamped_before_the_use_in_a_forward(amp, case):
    """From the first forward on, or from the third: that write is seen by the weight's version."""
    first, clamp = case

    class First(Block):
        turn = 0

        def forward(self, x):
            self.turn += 1
            if self.turn >= first:
                clamp(self.first.weight)
            return super().forward(x)

    trained(amp, First(), count=4)
