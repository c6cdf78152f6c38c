"""Situations: gradients that are zeroed, read, written, clipped and added by hand."""

import math
from functools import partial

import torch
from situations import PLAIN, Block, batches, each, mlp, mse, plain_loop, situation
from torch import nn

import ampatch


def for_each_gradient(write):
    """`write(p)` for each weight of the model that has a gradient."""

    def change(amp, model, optimizer):
        for p in model.parameters():
            if p.grad is not None:
                write(p)

    return change


def to_none(p):
    p.grad = None


def detached_and_zeroed(p):
    p.grad.detach_()
    p.grad.data.zero_()


RESETS = {  # actions of `programs.py`
    "by the model": lambda amp, model, optimizer: model.zero_grad(),
    "to zeros": lambda amp, model, optimizer: optimizer.zero_grad(set_to_none=False),
    "to None, the commonest old idiom": for_each_gradient(to_none),
    "in place": for_each_gradient(lambda p: p.grad.zero_()),
    "as `zero_grad` was written once": for_each_gradient(detached_and_zeroed),
}


def listed(amp, model, optimizer):
    grads = [p.grad for p in model.parameters()]
    amp.record(*torch._foreach_norm([grad.float() for grad in grads]))
    torch._foreach_mul_(grads, 0.5)


def clipped_in_a_loop_over_masters(amp, model, optimizer):
    grads = [p.grad for p in ampatch.master_params(optimizer)]
    norm = torch.stack([g.norm() for g in grads]).norm()
    amp.record(norm)
    for g in grads:
        g.mul_(0.05 / norm)


def centralized(p):
    if p.dim() > 1:
        p.grad -= p.grad.mean(1, keepdim=True)


def replaced(p):
    p.grad = p.grad * 0.5


CHANGES = {
    "clipped in a loop over masters": clipped_in_a_loop_over_masters,
    "averaged through data": for_each_gradient(lambda p: p.grad.data.div_(4)),
    "centralized": for_each_gradient(centralized),
    "replaced": for_each_gradient(replaced),
    "lists of them at once": listed,
    "one layer's set to None": lambda amp, model, optimizer: model[0].zero_grad(),
    "stepped on twice": lambda amp, model, optimizer: optimizer.step(),
}


@situation()
def gradients_are_changed_before_the_step(amp):
    model, optimizer = amp.start(mlp())
    for change in each(amp, CHANGES):
        plain_loop(amp, model, optimizer, 2, on_gradients=partial(change, amp, model, optimizer))


@situation()
def a_part_without_gradients(amp):
    """One head is used in every other batch; hooks on it see nothing of the others."""

    class TwoHeads(Block):
        turn = 0

        def forward(self, x):
            self.turn += 1
            x = self.encode(x)
            return self.head(x if self.turn % 2 else self.second(x))

    (model, optimizer), calls = amp.start(TwoHeads(), PLAIN), []
    for number, (x, y) in enumerate(batches(7)):
        if number == 4:
            model.second.weight.register_hook(lambda grad: calls.append(grad) and None)
            model.second.weight.register_post_accumulate_grad_hook(calls.append)
        loss, weights = mse(model(x), y), list(model.parameters())
        grads = torch.autograd.grad(loss, weights, allow_unused=True, retain_graph=True)
        amp.record(*[grad is None for grad in grads])
        amp.step(loss, optimizer)
        amp.record(model.second.weight.grad is None, len(calls))


@situation("O1 O2", halves="fp16")
def small_gradients_need_the_scale(amp):
    """Losses of 1e-7 give gradients that float16 rounds to 0 without the loss scale."""
    model, optimizer = amp.start(mlp(), partial(torch.optim.SGD, lr=1e6), init_scale=2.0**22)
    for x, y in batches(3):
        amp.step(mse(model(x), y) * 1e-7, optimizer)


@situation()
def gradients_kept_by_reference(amp):
    """What was taken from `p.grad` keeps its values when the next pass runs; until it is set to
    None it stays the same memory, through which it can be zeroed."""
    model, optimizer = amp.start(mlp(), PLAIN)
    kept = []
    plain_loop(
        amp, model, optimizer, 4, after=lambda: kept.append([p.grad for p in model.parameters()])
    )
    for x, y in batches(3):
        for grad in kept[-1]:
            grad.zero_()
        amp.backward(mse(model(x), y), optimizer)
        optimizer.step()
        for grads in kept:
            amp.record(*grads)


class Trunk(Block):
    def forward(self, x):
        x = torch.tanh(self.second(self.encode(x)))
        return self.head(x), x


@situation("O1 O2")
def gradients_of_a_single_weight(amp):
    """As VQGAN weighs its losses by those of the last layer; a loss of the trunk comes after it.

    In the first step the weights share a node.  A batch of gradients, and second derivatives."""
    model, optimizer = amp.start(Trunk(), PLAIN)
    weight = model.head.weight
    for x, y in batches(4):
        out, _ = model(x)
        (grad,) = torch.autograd.grad(mse(out, y), weight, retain_graph=True)
        (other,) = torch.autograd.grad(mse(out, -y), weight, retain_graph=True)
        amp.record(grad, other)
        for asked in (weight, list(model.parameters())):
            up = torch.eye(2).repeat(1, 6).view(2, 6, 2).to(out.dtype)
            amp.record(
                *torch.autograd.grad(out, asked, up, is_grads_batched=True, retain_graph=True)
            )
        amp.step(mse(out, y) + grad.norm() / (other.norm() + 1e-4) * mse(out, -y), optimizer)
        (grad,) = torch.autograd.grad(mse(model(x)[0], y), weight, create_graph=True)
        amp.step(grad.square().sum(), optimizer)
        out, hidden = model(x)
        amp.record(*torch.autograd.grad(mse(out, y), weight))
        amp.step(hidden.float().square().mean(), optimizer)


@situation("O1 O2")
def sparse_gradients_that_overflow_or_wait(amp):
    make = partial(torch.optim.SparseAdam, lr=0.1)
    model, optimizer = amp.start(nn.Embedding(10, 2, sparse=True), make, loss_scale="dynamic")
    for number, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        for words in (x[:, :2].abs() * 3).long().clamp(max=9).unbind(1):
            loss = mse(model(words), y) * (math.inf if number == 2 else 1.0)
            amp.backward(loss, optimizer, {"delay_unscale": True})
        optimizer.step()


@situation(cases={"": 9})
@situation("O1 O2", cases={"with_a_hook_and_asked_for_alone": 2})
def sparse_embedding_gradients(amp, case):
    model, optimizer = amp.start(nn.Sequential(nn.Embedding(10, 4, sparse=True), mlp()), PLAIN)
    weight = model[0].weight
    for number, (x, y) in enumerate(batches(4)):
        if number == case:
            weight.register_hook(lambda grad: grad * 1)
        words = (x[:, 0].abs() * 3).long().clamp(max=9)
        amp.step(mse(model(words), y), optimizer)
        if case < 4:
            amp.record(torch.autograd.grad(mse(model(words), y), weight)[0].to_dense())


@situation("O1 O2")
def gradients_in_one_flat_buffer(amp):
    """As hand-written data parallelism has it: `p.grad` are views, and the buffer is reduced."""
    model, optimizer = amp.start(mlp(), PLAIN)
    params = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in params))
    for p, part in zip(params, flat.split([p.numel() for p in params])):
        p.grad = part.view_as(p)
    for x, y in batches(3):
        flat.zero_()
        amp.backward(mse(model(x), y), optimizer)
        flat.mul_(0.5)
        amp.record(flat)
        optimizer.step()
