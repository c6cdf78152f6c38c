"""Who looks into a backward pass at O1 sees what torch.autocast would show."""

from __future__ import annotations

import contextlib
import functools
import threading

import pytest
import torch
from torch import nn
from torch.autograd import Function, Variable
from torch.utils.checkpoint import checkpoint

import ampatch

H = torch.bfloat16
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
_early_backward, _early_grad = torch.autograd.backward, torch.autograd.grad


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


class Holder:
    run = staticmethod(torch.autograd.backward)


def method_of_a_library(tensor, *args):
    torch.autograd.backward(tensor, *args)


EARLY = {
    "global": lambda loss: _early_backward(loss),
    "closure": (lambda run: lambda loss: run(loss))(torch.autograd.backward),
    "class attribute": lambda loss: Holder.run(loss),
    "partial": functools.partial(torch.autograd.backward, retain_graph=False),
    "library's Tensor.backward": method_of_a_library,
    "engine": lambda loss: Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True
    ),
}


@pytest.mark.parametrize("way", EARLY)
def test_backward_bound_before_the_session(way):
    def three_steps(model):
        losses = []
        for _ in range(3):
            loss = loss_of(model)
            EARLY[way](loss)
            losses.append(loss.detach())
        loss_of(model).backward()
        return losses

    assert_as_autocast(three_steps)


def test_grad_bound_before_the_session():
    def both(model):
        weights = list(model.parameters())
        return list(_early_grad(loss_of(model), weights))

    assert_as_autocast(both)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_backward_within_torchscript():
    @torch.jit.script
    def run(loss: torch.Tensor) -> None:
        loss.backward()

    def act(model):
        run(loss_of(model))
        run(loss_of(model))

    assert_as_autocast(act)


def full_backward_hooks(model):
    seen = []
    handles = [
        model[index].register_full_backward_hook(
            lambda module, *rest: seen.append(
                None if module.weight.grad is None else module.weight.grad.clone()
            )
        )
        for index in (2, 4)
    ]
    x = X.clone().requires_grad_()
    for _ in range(2):
        loss_of(model, x).backward()
    for handle in handles:
        handle.remove()
    return seen


def hook_of_the_whole_model(model):
    """Runs when all gradients of its children are there."""
    seen = []
    target = getattr(model, "model", model)
    handle = target.register_full_backward_hook(lambda module, *rest: seen.extend(grads(module)))
    x = X.clone().requires_grad_()
    loss_of(model, x).backward()
    handle.remove()
    return seen


def step_in_module_hooks(model):
    """Each layer is stepped, and its gradients dropped, as soon as they are there."""

    def step(module, *rest):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None

    handles = [model[index].register_full_backward_hook(step) for index in (2, 4)]
    x = X.clone().requires_grad_()
    for _ in range(3):
        loss_of(model, x).backward()
        model[0].zero_grad()
    for handle in handles:
        handle.remove()
    return [p.detach().clone() for p in model.parameters()]


def engine_callback(model):
    seen = []

    class Last(Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            Variable._execution_engine.queue_callback(lambda: seen.extend(grads(model)))
            return grad

    Last.apply(loss_of(model)).backward()
    return seen


def hooks_of_accumulators(model):
    seen, held = [], []
    for parameter in model.parameters():
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, parameter=parameter: seen.append(parameter.grad.clone()))
        held.append(node)
    loss_of(model).backward()
    return sorted(seen, key=lambda grad: (grad.numel(), grad.sum().item()))


def post_accumulate_hooks(model):
    seen = []
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for p in model.parameters()
    ]
    loss_of(model).backward()
    for handle in handles:
        handle.remove()
    return sorted(seen, key=lambda grad: (grad.numel(), grad.sum().item()))


def multi_grad_hook_after_the_forward(model):
    seen = []
    loss = loss_of(model)
    handle = torch.autograd.graph.register_multi_grad_hook(
        list(model.parameters()), lambda grads: seen.extend(grad.clone() for grad in grads)
    )
    loss.backward()
    handle.remove()
    return seen


def hook_that_changes_the_gradient(model):
    handle = next(model.parameters()).register_hook(lambda grad: 2 * grad)
    loss_of(model).backward()
    handle.remove()
    loss_of(model).backward()


def grads_read_in_a_hook_of_an_activation(model):
    """A hook set on an activation in the forward reads the later layers' gradients.

    In the first such forward the weights may have been cast together (docs/limits.md).
    """
    seen = []
    layer = model[2]
    handle = layer.register_forward_hook(
        lambda module, args, out: (
            out.register_hook(lambda grad: seen.append(model[4].weight.grad)) and None
        )
    )
    loss_of(model).backward()
    seen.clear()
    for _ in range(2):
        loss_of(model).backward()
    seen[:] = [grad.clone() for grad in seen]
    handle.remove()
    return seen


@pytest.mark.parametrize(
    "action",
    [
        full_backward_hooks,
        hook_of_the_whole_model,
        step_in_module_hooks,
        engine_callback,
        hooks_of_accumulators,
        post_accumulate_hooks,
        multi_grad_hook_after_the_forward,
        hook_that_changes_the_gradient,
        grads_read_in_a_hook_of_an_activation,
    ],
)
def test_hooks_see_what_they_see_under_autocast(action):
    assert_as_autocast(action)


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


# Checkpoints, threads, modes


def everything(context, op, *args, **kwargs):
    return torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE


def products(context, op, *args, **kwargs):
    policy = torch.utils.checkpoint.CheckpointPolicy
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return policy.MUST_SAVE if is_product else policy.PREFER_RECOMPUTE


@pytest.mark.filterwarnings("ignore:.*cpu.amp.autocast:FutureWarning")  # torch 2.4's own
@pytest.mark.parametrize("policy", [everything, products])
def test_selective_checkpoints(policy):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, x):
            x = x + self.body[0](x)[:, :4]  # used outside of the checkpoint first
            contexts = functools.partial(
                torch.utils.checkpoint.create_selective_checkpoint_contexts, policy
            )
            return checkpoint(self.body, x, use_reentrant=False, context_fn=contexts)

    plain = Checkpointed()
    with torch.autocast("cpu", dtype=H, cache_enabled=False):  # with the cache it raises here
        loss = loss_of(plain, X.clone().requires_grad_())
    loss.backward()
    model = managed(Checkpointed())
    for _ in range(3):
        model.zero_grad()
        loss_of(model, X.clone().requires_grad_()).backward()
        for one, other in zip(grads(model), grads(plain), strict=True):
            torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)


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


def test_two_threads_whose_backward_passes_wait_for_each_other():
    barrier = threading.Barrier(2, timeout=30)

    class Meet(Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            barrier.wait()
            return grad

    models = managed([network(), network()])
    for model in models:
        loss_of(model).backward()
        model.zero_grad()
    threads = [
        threading.Thread(target=lambda model=model: Meet.apply(loss_of(model)).backward())
        for model in models
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    for model in models:
        assert_equal(grads(model), autocast(lambda model: loss_of(model).backward())[1])


def test_fake_tensors_before_a_real_step():
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = managed()
    for _ in range(2):
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(torch.ones(5, 4))
        model.zero_grad()
        loss_of(model).backward()
        assert_equal(grads(model), autocast(lambda model: loss_of(model).backward())[1])


def test_parameters_that_are_swapped_when_a_model_moves():
    found = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = managed()
        for _ in range(3):
            loss_of(model).backward()
            model.zero_grad()
        model._apply(torch.clone)  # as moving to another device does
        loss_of(model).backward()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(found)
    assert_equal(grads(model), autocast(lambda model: loss_of(model).backward())[1])


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
    for _ in range(2):  # from the second on the weights are cast together
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


@pytest.mark.parametrize("kind", ["hook", "late"])
def test_hooks_put_on_a_weight_that_the_waiting_pass_does_not_reach(kind):
    model, seen = managed(TwoHeads()), []
    for step in range(3):
        model.zero_grad()
        first, second = model(X)
        if step == 2:
            if kind == "hook":
                model.b.weight.register_hook(seen.append)
            else:
                model.b.weight.register_post_accumulate_grad_hook(lambda w: seen.append(w.grad))
        first.float().mean().backward(retain_graph=True)
        assert seen == []
        second.float().mean().backward()
    assert len(seen) == 1 and seen[0] is not None
