"""Who looks into a backward pass at O1 sees what torch.autocast would show.

Most of it is in `tests/laws/situations_hooks.py` and `situations_graphs.py`.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import ampatch

H = torch.bfloat16
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def managed(model=None, **settings):
    model = network() if model is None else model
    return ampatch.initialize(model, opt_level="O1", dtype=H, verbosity=0, **settings)


def loss_of(model, x=X) -> torch.Tensor:
    return model(x).float().pow(2).sum()


def grads(model) -> list:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def autocast(action, model=None):
    """What `action(model)` returns, and the gradients it leaves, under torch.autocast."""
    model = network() if model is None else model

    class Autocast(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, *args):
            with torch.autocast("cpu", dtype=H):
                return self.model(*args)

        def __getitem__(self, index):
            return self.model[index]

    wrapped = Autocast()
    return action(wrapped), grads(model)


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if other is None or one is None:
            assert one is other
        else:
            assert one.dtype is other.dtype and torch.equal(one, other)


def assert_as_autocast(action, forwards_before=2):
    """`action(model)` returns and leaves the same at O1, first and later, as under autocast."""
    expected = autocast(action)
    for before in (0, forwards_before):
        model = managed()
        for _ in range(before):
            loss_of(model).backward()
            model.zero_grad()
        result = action(model)
        found = grads(model)
        ampatch.deactivate()
        assert_equal(found, expected[1])
        if isinstance(result, list):
            assert_equal(result, expected[0])
        else:
            assert result == expected[0]


def hook_of_the_whole_model(model):
    """Runs when all gradients of its children are there."""
    seen = []
    target = getattr(model, "model", model)
    handle = target.register_full_backward_hook(lambda module, *rest: seen.extend(grads(module)))
    x = X.clone().requires_grad_()
    loss_of(model, x).backward()
    handle.remove()
    return seen


def test_hooks_see_what_they_see_under_autocast():
    assert_as_autocast(hook_of_the_whole_model)


def test_hooks_of_every_module():
    def act(model):
        seen = []
        handle = nn.modules.module.register_module_full_backward_hook(
            lambda module, *rest: (
                seen.append(module.weight.grad.clone()) if hasattr(module, "weight") else None
            )
        )
        try:
            loss_of(model, X.clone().requires_grad_()).backward()
        finally:
            handle.remove()
        return seen

    assert_as_autocast(act)


# A weight that a pass does not reach


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.body, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        x = self.body(x)
        return self.a(x), self.b(x)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_head_that_the_loss_leaves_out_has_no_gradient(hooked):
    model, seen = managed(TwoHeads()), []
    for _ in range(2):
        (model(X)[0].float().sum() + model(X)[1].float().sum()).backward()
        model.zero_grad()
    if hooked:
        model.b.weight.register_hook(seen.append)
        model.b.weight.register_post_accumulate_grad_hook(seen.append)
    model(X)[0].float().sum().backward()
    assert model.b.weight.grad is None and model.b.bias.grad is None and seen == []
    assert model.a.weight.grad is not None


def test_layers_that_some_forwards_leave_out():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x, used):
            for index in used:
                x = self.layers[index](x)
            return x

    paths = [(0, 1, 2, 3), (0, 1, 2, 3), (0, 3), (1, 2), (0, 1, 2, 3), (3, 0)]
    model, plain = managed(Skips()), Skips()
    for used in paths:
        model(X, used).float().sum().backward()
        with ampatch.disable_casts(), torch.autocast("cpu", dtype=H):
            loss = plain(X, used).float().sum()
        loss.backward()
        assert_equal(grads(model), grads(plain))


# Checkpoints


def test_a_checkpoint_sees_weights_changed_before_the_recompute():
    """As in FP32: what is recomputed is recomputed with the weights there are then."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False)

    def run(model, cast):
        with torch.autocast("cpu", dtype=H) if cast else contextlib.nullcontext():
            loss = loss_of(model, X.clone().requires_grad_())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        loss.backward()
        return grads(model)

    expected = run(Checkpointed(), True)
    model = managed(Checkpointed())
    assert_equal(run(model, False), expected)


# Two sessions in turn


class Product(Function):
    """A product whose backward multiplies with torch's functions, and says in which dtype."""

    seen: list = []

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        back = torch.mm(grad, weight.t())
        Product.seen.append(back.dtype)
        return back.to(x.dtype), torch.mm(x.t(), grad).to(weight.dtype)


class Custom(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.checkpointed = checkpointed

    def forward(self, x):
        def part(x):
            return Product.apply(x, self.weight).float().tanh()

        return checkpoint(part, x, use_reentrant=False) if self.checkpointed else part(x)


@pytest.mark.filterwarnings("ignore:.*cpu.amp.autocast:FutureWarning")  # torch 2.4's own
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_backward_pass_runs_under_its_forward_s_policy(checkpointed):
    models = [
        ampatch.initialize(Custom(checkpointed), opt_level="O1", dtype=dtype, verbosity=0)
        for dtype in (torch.float16, torch.bfloat16)
    ]
    Product.seen.clear()
    losses = [model(X).sum() for model in models]
    for loss in losses:
        loss.backward()
    assert Product.seen == [torch.float16, torch.bfloat16]
    first = models[0](X).sum()
    ampatch.initialize(nn.Linear(1, 1), opt_level="O1", dtype=torch.bfloat16, verbosity=0)
    with ampatch.disable_casts():
        uncast = Product.apply(X.clone().requires_grad_(), torch.eye(4)).sum()
    first.backward()
    uncast.backward()
    assert Product.seen[2:] == [torch.float16, torch.float32]


def test_contexts_of_functions_are_as_torch_has_them_afterwards():
    from torch.autograd.function import BackwardCFunction

    before = dict(vars(BackwardCFunction))
    managed()
    assert dict(vars(BackwardCFunction)) != before
    ampatch.deactivate()
    assert dict(vars(BackwardCFunction)) == before
    assert "data" not in vars(nn.Parameter)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of torch's own
def test_compiled_autograd():
    import torch._dynamo.compiled_autograd as compiled

    enable = getattr(compiled, "_enable", None) or compiled.enable
    expected = autocast(lambda model: loss_of(model).backward())[1]
    model = managed()
    compiler = torch.compile(backend="aot_eager")
    for _ in range(2):  # the second begins with the weights that the first has cast
        model.zero_grad()
        with enable(compiler):
            loss_of(model).backward()
        assert_equal(grads(model), expected)


# Found by trials from outside


def test_a_batch_of_gradients():
    def act(model):
        out = model(X).float().sum(0)
        return list(
            torch.autograd.grad(out, list(model.parameters()), torch.eye(3), is_grads_batched=True)
        )

    assert_as_autocast(act)


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_steps_within_the_forward(fused):
    """Test-time training; a fused optimizer raises no versions."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(4, 4)

        def forward(self, x):
            optimizer = torch.optim.SGD(self.net.parameters(), 0.1, fused=fused)
            losses = []
            for _ in range(4):
                optimizer.zero_grad()
                loss = (self.net(x) - x).float().pow(2).mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses

    with torch.autocast("cpu", dtype=H, cache_enabled=False):
        expected = Inner()(X)
    assert len(set(expected)) == 4
    model = managed(Inner())
    assert model(X) == expected
    model.net.load_state_dict(Inner().net.state_dict())
    assert model(X) == expected


def test_gradients_arrive_while_earlier_layers_are_computed():
    """A node made as the forward begins would run last, and half gradients would wait for it."""
    torch.manual_seed(0)
    model, there = nn.Sequential(*(nn.Linear(4, 4) for _ in range(80))), []  # several buckets
    managed(model)
    loss_of(model).backward()
    model.zero_grad()
    model[1].register_forward_hook(
        lambda module, args, out: (
            out.register_hook(lambda grad: there.extend(p.grad for p in model.parameters()))
            and None
        )
    )
    loss_of(model).backward()
    assert [grad is not None for grad in there[-32:]] == [True] * 32
    assert [grad is not None for grad in there[:4]] == [False] * 4
