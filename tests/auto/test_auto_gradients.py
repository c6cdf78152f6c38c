"""`--auto`: gradients that no optimizer steps on, and hooks that look at them."""

from __future__ import annotations

import warnings

import pytest
import torch
from auto_loops import asked, batch, both, close, grads, net, weights  # noqa: F401
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ampatch import auto


def test_all_gradients_are_true(asked):
    """Inputs, results with retain_grad, frozen-out weights, float64: added to earlier ones."""

    def loop():
        model = net()
        left_out = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x, y = batch()
        x.requires_grad_()
        double = torch.ones(1, dtype=torch.float64, requires_grad=True)
        found = []
        hidden = model[:2](x)
        hidden.retain_grad()
        out = left_out(model[2](hidden)).float() * double
        for _ in range(2):
            F.mse_loss(out, y.double()).backward(retain_graph=True)
            found.append([t.grad.clone().float() for t in (x, hidden, double)] + grads(left_out))
        optimizer.step()
        return found, weights(model)

    close(*both(loop, asked))


def test_weights_updated_by_hand(asked):
    def loop():
        w = torch.zeros(4, 1, requires_grad=True)
        for _ in range(5):
            x, y = batch()
            F.mse_loss(x @ w, y).backward()
            with torch.no_grad():
                w -= 0.1 * w.grad
                w.grad.zero_()
        return w.detach()

    close(*both(loop, asked))


def test_weights_updated_by_hand_do_not_meet_the_first_scale(caplog):
    """No code would skip this step, so its backward pass is not scaled."""
    auto.start({})
    w = torch.ones(4, 1, requires_grad=True)
    for _ in range(2):
        w.grad = None
        (torch.ones(1, 4) @ w * 1000.0).sum().backward()
        assert torch.equal(w.grad, torch.full((4, 1), 1000.0))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "reached no parameter of a torch.optim.Optimizer" in told[0]


def test_autograd_grad_is_the_users_own(asked):
    def loop():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x, y = batch()
        x.requires_grad_()
        score = model(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).pow(2).mean()
        (F.mse_loss(score, y) + penalty).backward()
        optimizer.step()
        return slope.detach(), penalty.detach(), weights(model)

    close(*both(loop, asked))


def test_a_graph_of_the_gradient(asked):
    def loop():
        w = nn.Parameter(torch.full((4,), 0.5))
        optimizer = torch.optim.SGD([w], lr=0.1)
        (w**3).sum().backward(create_graph=True)
        first = w.grad
        w.grad = None
        first.sum().backward()
        optimizer.step()
        return first.detach(), w.grad.clone(), w.detach()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph")
        close(*both(loop, asked))


def test_inputs_and_given_gradients(asked):
    def loop():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, _ = batch()
        hidden = model[:2](x)
        out = model[2](hidden)
        first = list(model[0].parameters())
        out.backward(torch.full_like(out, 0.5), inputs=first, retain_graph=True)
        alone = grads(model)
        torch.autograd.backward((out, out * 2), (torch.ones_like(out), torch.ones_like(out)))
        optimizer.step()
        return alone[:2], alone[2:], weights(model)

    expected, found = both(loop, asked)
    assert expected[1] == found[1] == [None, None]
    close(expected[::2], found[::2])


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant, asked):
    def loop():
        model, left_out = net(), nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = batch()
        x.requires_grad_()
        for _ in range(2):
            out = checkpoint(lambda x: model(left_out(x)), x, use_reentrant=reentrant)
            F.mse_loss(out, y).backward()
        seen = grads(left_out), grads(model), x.grad.clone()
        optimizer.step()
        return seen, weights(model)

    close(*both(loop, asked))


def test_a_pass_within_a_pass_that_starts_from_a_loss_of_its_own(asked):
    def loop():
        model = net()
        side = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([*model.parameters(), side], lr=0.1)
        x, y = batch()
        out = model(x)

        def hook(grad):
            with torch.enable_grad():
                twice = (side * 2).sum()
            twice.backward()

        out.register_hook(hook)
        F.mse_loss(out, y).backward()
        optimizer.step()
        return side.grad.clone(), grads(model), weights(model)

    close(*both(loop, asked))


def test_hooks_see_true_gradients(asked):
    def loop():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        model[2].weight.register_hook(lambda grad: seen.append(grad.clone().float()))
        handle = model[2].register_full_backward_hook(
            lambda module, given, got: seen.extend(g.clone().float() for g in (*given, *got))
        )
        model[0].register_full_backward_pre_hook(lambda module, got: tuple(g * 2 for g in got))
        x, y = batch()
        x.requires_grad_()  # module hooks want it
        hidden = model[:2](x)
        hidden.register_hook(lambda grad: grad.clamp(-0.005, 0.005))
        F.mse_loss(model[2](hidden), y).backward()
        handle.remove()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        return seen, weights(model)

    expected, found = both(loop, asked)
    assert len(found[0]) == 4
    close(expected, found)


def test_a_hook_that_writes_in_place():
    def loop():
        w = nn.Parameter(torch.ones(3))
        _optimizer = torch.optim.SGD([w], lr=0.1)

        def halve(grad):
            grad.mul_(0.5)

        between = w * 1.0
        between.register_hook(halve)
        (between * 1.0).sum().backward()
        return w.grad.clone()

    close(*both(loop))


def test_hooks_on_tensor_subclasses():
    """Their functions call torch's again, by the names that are ours now."""

    class Named(torch.Tensor):
        pass

    def loop():
        w, seen = nn.Parameter(torch.ones(3)), []
        optimizer = torch.optim.SGD([w], lr=0.1)
        between = (w * 2.0).as_subclass(Named)
        between.register_hook(lambda grad: seen.append(grad.clone().as_subclass(torch.Tensor)))
        (between * 3.0).sum().as_subclass(torch.Tensor).backward()
        optimizer.step()
        return seen, w.detach()

    close(*both(loop))


def test_an_optimizer_step_within_the_backward_pass(asked):
    def loop():
        model = net()
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            x, y = batch()
            F.mse_loss(model(x), y).backward()
        return weights(model)

    close(*both(loop, asked))
