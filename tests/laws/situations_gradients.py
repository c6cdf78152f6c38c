"""Situations: gradients that are zeroed, read, written, clipped and added by hand."""

from __future__ import annotations

from functools import partial

import torch
from drivers import SGD
from situations import Block, batches, mlp, mse, plain_loop, situation
from torch import nn

PLAIN = partial(torch.optim.SGD, lr=0.1)


def reset_by(amp, reset):
    """Two backward passes; what `reset` does in between throws the first one's gradients away."""
    model, optimizer = amp.start(mlp())
    for x, y in batches(4):
        amp.backward(mse(model(-x), y), optimizer)
        reset(model, optimizer)
        amp.backward(mse(model(x), y), optimizer)
        optimizer.step()
        reset(model, optimizer)


@situation()
def reset_by_model_zero_grad(amp):
    reset_by(amp, lambda model, optimizer: model.zero_grad())


@situation()
def reset_by_zero_grad_to_zeros(amp):
    reset_by(amp, lambda model, optimizer: optimizer.zero_grad(set_to_none=False))


@situation(letter="m")
def reset_by_none(amp):
    """The commonest old idiom."""

    def reset(model, optimizer):
        for p in model.parameters():
            p.grad = None

    reset_by(amp, reset)


@situation(letter="m")
def reset_by_zeroing_in_place(amp):
    def reset(model, optimizer):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()

    reset_by(amp, reset)


@situation(letter="m")
def reset_by_detach_and_zero(amp):
    """As `zero_grad` was written once."""

    def reset(model, optimizer):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.detach_()
                p.grad.data.zero_()

    reset_by(amp, reset)


@situation()
def reset_by_none_through_param_groups(amp):
    def reset(model, optimizer):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = None

    reset_by(amp, reset)


@situation(letter="m")
def one_layers_gradients_set_to_none(amp):
    model, optimizer = amp.start(mlp())
    for number, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        amp.backward(mse(model(x), y), optimizer)
        if number % 2:
            for p in model[0].parameters():
                p.grad = None
        optimizer.step()


@situation("O2", letter="m")
def reset_by_none_after_plain_backward(amp):
    model, optimizer = amp.start(mlp(), loss_scale=1.0)
    for x, y in batches(4):
        amp.plain_backward(mse(model(x), y))
        optimizer.step()
        for p in model.parameters():
            p.grad = None


def change_gradients(amp, change, make=SGD, count=4):
    """Ordinary steps, with `change(model, optimizer)` between the backward pass and the step."""
    model, optimizer = amp.start(mlp(), make)
    for x, y in batches(count):
        optimizer.zero_grad()
        amp.backward(mse(model(x), y), optimizer)
        change(model, optimizer)
        optimizer.step()


@situation(letter="m")
def norms_are_logged(amp):
    """`p.grad` is there for code between the block and the step."""

    def log(model, optimizer):
        for p in model.parameters():
            assert p.grad is not None, "no gradient to log"
            amp.record(p.grad.float().norm())

    change_gradients(amp, log)


@situation(letter="m")
def an_all_reduce_by_hand(amp):
    """Each gradient is multiplied in place, as an average over ranks would be."""

    def average(model, optimizer):
        for p in model.parameters():
            p.grad.mul_(0.25)

    change_gradients(amp, average, PLAIN)


@situation(letter="m")
def an_all_reduce_by_hand_through_data(amp):
    def average(model, optimizer):
        for p in model.parameters():
            p.grad.data.div_(4)

    change_gradients(amp, average, PLAIN)


@situation(letter="m")
def gradient_surgery(amp):
    """PCGrad: one task's gradient is projected, both are written back."""
    model, optimizer = amp.start(mlp(), PLAIN)
    for x, y in batches(4):
        found = []
        for task in range(2):
            optimizer.zero_grad()
            amp.backward(mse(model(x)[:, task], y[:, task]), optimizer)
            found.append([p.grad.clone() for p in model.parameters()])
        for p, first, second in zip(model.parameters(), *found):
            dot = (first.float() * second.float()).sum()
            if dot < 0:
                scaled = second * (dot / second.float().square().sum()).to(second.dtype)
                first = first - scaled
            p.grad = first + second
        optimizer.step()


@situation(letter="m")
def gradients_written_by_hand(amp):
    """No backward at all: an evolution strategy's, or another framework's gradients."""
    model, optimizer = amp.start(mlp(), PLAIN)
    for number in range(3):
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.25 * (number + 1))
        optimizer.step()


@situation()
def gradients_of_autograd_grad_assigned(amp):
    model, optimizer = amp.start(mlp(), PLAIN)
    for x, y in batches(4):
        params = list(model.parameters())
        optimizer.zero_grad()
        for p, g in zip(params, torch.autograd.grad(mse(model(x), y), params)):
            p.grad = g
        optimizer.step()


@situation("O1 O2")
def gradients_of_param_groups_are_changed(amp):
    """Noise, centralization: through what the optimizer holds."""

    def centralize(model, optimizer):
        for p in optimizer.param_groups[0]["params"]:
            if p.dim() > 1:
                p.grad.sub_(p.grad.mean(1, keepdim=True))

    change_gradients(amp, centralize)


@situation(letter="m")
def gradients_of_the_model_are_centralized(amp):
    def centralize(model, optimizer):
        for p in model.parameters():
            if p.dim() > 1:
                p.grad -= p.grad.mean(1, keepdim=True)

    change_gradients(amp, centralize, PLAIN)


@situation()
def clip_in_each_micro_batch(amp):
    model, optimizer = amp.start(mlp())
    for number, (x, y) in enumerate(batches(6)):
        amp.backward(mse(model(x), y), optimizer)
        amp.clip(model, optimizer, 0.1)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


@situation("O1 O2")
def clip_by_a_loop_over_masters(amp):
    import ampatch

    def clip(model, optimizer):
        grads = [p.grad for p in ampatch.master_params(optimizer)]
        norm = torch.stack([g.norm() for g in grads]).norm()
        amp.record(norm)
        for g in grads:
            g.mul_(0.05 / norm)

    change_gradients(amp, clip)


@situation()
def a_part_without_gradients(amp):
    """One head is used in every other batch."""

    class TwoHeads(Block):
        turn = 0

        def forward(self, x):
            self.turn += 1
            x = self.encode(x)
            return self.head(x if self.turn % 2 else self.second(x))

    model, optimizer = amp.start(TwoHeads(), PLAIN)
    for x, y in batches(5):
        amp.step(mse(model(x), y), optimizer)
        amp.record(model.second.weight.grad is None)


@situation("O1 O2", halves="fp16")
def small_gradients_need_the_scale(amp):
    """Losses of 1e-7 give gradients that float16 rounds to 0 without the loss scale."""
    model, optimizer = amp.start(mlp(), partial(torch.optim.SGD, lr=1e6), init_scale=2.0**22)
    for x, y in batches(3):
        amp.step(mse(model(x), y) * 1e-7, optimizer)


@situation("O1 O2", within=1e-6)
def two_losses_with_two_scales_in_one_step(amp):
    model, optimizer = amp.start(mlp())
    for x, y in batches(3):
        optimizer.zero_grad()
        amp.backward(mse(model(x), y), optimizer)
        amp.backward(mse(model(-x), y) * 100, optimizer)
        optimizer.step()


@situation()
def a_step_without_zero_grad(amp):
    """Gradients pile up over steps, as the script wants."""
    model, optimizer = amp.start(mlp(), partial(torch.optim.SGD, lr=0.02))
    for x, y in batches(4):
        amp.backward(mse(model(x), y), optimizer)
        optimizer.step()


@situation()
def two_steps_on_the_same_gradients(amp):
    change_gradients(amp, lambda model, optimizer: optimizer.step(), PLAIN, count=3)


@situation()
def gradients_kept_by_reference(amp):
    """What was taken from `p.grad` keeps its values when the next pass runs."""
    model, optimizer = amp.start(mlp())
    kept = []
    for x, y in batches(4):
        optimizer.zero_grad()
        amp.backward(mse(model(x), y), optimizer)
        kept.append([p.grad for p in optimizer.param_groups[0]["params"]])
        optimizer.step()
    for grads in kept:
        amp.record(*grads)


@situation("O1")
def sparse_embedding_gradients(amp):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(10, 4, sparse=True)
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.embed((x[:, 0].abs() * 3).long().clamp(max=9)))

    model, optimizer = amp.start(Words(), PLAIN)
    plain_loop(amp, model, optimizer, 4)


@situation("O2 O3")
def sparse_embedding_gradients_of_half_weights(amp):
    model, optimizer = amp.start(nn.Sequential(nn.Embedding(10, 4, sparse=True), mlp()), PLAIN)
    for x, y in batches(4):
        words = (x[:, 0].abs() * 3).long().clamp(max=9)
        amp.step(mse(model(words), y), optimizer)


@situation()
def gradients_zeroed_through_kept_references(amp):
    """`p.grad` stays the same memory until it is set to None."""
    model, optimizer = amp.start(mlp(), PLAIN)
    x, y = next(batches(1))
    amp.backward(mse(model(x), y), optimizer)
    kept = [p.grad for p in model.parameters()]
    for x, y in batches(3):
        for grad in kept:
            grad.zero_()
        amp.backward(mse(model(x), y), optimizer)
        optimizer.step()
        amp.record(*kept)


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


@situation()
def gradients_written_before_a_pass(amp):
    """What is there before a block is added to, not scaled."""
    model, optimizer = amp.start(mlp(), PLAIN)
    for x, y in batches(3):
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.125)
        amp.backward(mse(model(x), y), optimizer)
        optimizer.step()


@situation()
def lists_of_gradients_at_once(amp):
    model, optimizer = amp.start(mlp(), PLAIN)
    for x, y in batches(3):
        optimizer.zero_grad()
        amp.backward(mse(model(x), y), optimizer)
        grads = [p.grad for p in model.parameters()]
        amp.record(*torch._foreach_norm([grad.float() for grad in grads]))
        torch._foreach_mul_(grads, 0.5)
        optimizer.step()
