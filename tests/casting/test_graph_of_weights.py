"""What looks into a backward pass at O1 meets the weights themselves, in FP32."""

from __future__ import annotations

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import ampatch
from ampatch.casting import batched_casts

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


@pytest.fixture
def model():
    return ampatch.initialize(network(), opt_level="O1", dtype=torch.bfloat16, verbosity=0)


def loss_of(model) -> torch.Tensor:
    return model(X).float().pow(2).sum()


def autocast_loss(model) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model)


def plain_grads() -> list[torch.Tensor]:
    model = network()
    autocast_loss(model).backward()
    return [parameter.grad for parameter in model.parameters()]


def grads(model) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def assert_equal(found, expected):
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


HOOKS = {
    "hook": lambda weight, call: weight.register_hook(lambda grad: call(grad)),
    "late": lambda weight, call: weight.register_post_accumulate_grad_hook(
        lambda weight: call(weight.grad)
    ),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("when", ["first", "between", "after forward", "after deactivate"])
def test_hooks_see_float32_gradients(model, kind, when):
    weight, seen = model[0].weight, []
    if when in ("between", "after forward"):
        loss_of(model).backward()
        model.zero_grad()
    if when in ("first", "between"):
        HOOKS[kind](weight, seen.append)
    loss = loss_of(model)
    if when.startswith("after"):
        if when == "after deactivate":
            ampatch.deactivate()
        HOOKS[kind](weight, seen.append)
    loss.backward()
    assert len(seen) == 1 and seen[0].dtype is torch.float32
    assert_equal(grads(model), plain_grads())


@pytest.mark.parametrize("when", ["first", "after forward"])
def test_a_hook_may_change_the_gradient(model, when):
    weight = model[0].weight
    loss = loss_of(model) if when == "after forward" else None
    handle = weight.register_hook(lambda grad: 3 * grad)
    (loss_of(model) if loss is None else loss).backward()
    assert torch.equal(weight.grad, 3 * plain_grads()[0])
    handle.remove()
    model.zero_grad()
    loss_of(model).backward()
    assert_equal(grads(model), plain_grads())


def test_an_optimizer_in_the_backward_pass(model):
    """Every weight steps as soon as its gradient is there (torch's tutorial on memory)."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss_of(model).backward()
    for parameter, old, grad in zip(model.parameters(), before, plain_grads(), strict=True):
        torch.testing.assert_close(parameter.detach(), old - 0.1 * grad, rtol=0, atol=1e-6)


def test_other_code_holds_the_gradient_accumulator(model):
    """As all-reducing wrappers did before there were hooks after accumulation."""
    weight, calls = model[0].weight, []
    accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda *grads: calls.append(weight.grad.dtype))
    loss_of(model).backward()
    assert calls == [torch.float32]
    del accumulator


def test_ranks_that_talk(model, tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    try:
        loss_of(model).backward()
    finally:
        torch.distributed.destroy_process_group()
    assert_equal(grads(model), plain_grads())


# torch.autograd.grad


def test_grad_of_parameters(model):
    found = torch.autograd.grad(loss_of(model), list(model.parameters()))
    assert grads(model) == [None] * 4
    assert_equal(found, plain_grads())
    assert [one.dtype for one in found] == [torch.float32] * 4
    (one,) = torch.autograd.grad(loss_of(model), model[2].bias)
    assert torch.equal(one, plain_grads()[3])


def test_grad_of_parameters_as_a_generator(model):
    """As everybody writes it: `autograd.grad(loss, model.parameters())`."""
    assert_equal(torch.autograd.grad(loss_of(model), model.parameters()), plain_grads())
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss_of(model), named.values(), allow_unused=True)
    assert_equal(found, plain_grads())
    x = X.clone().requires_grad_()
    (found,) = torch.autograd.grad(model(x).float().sum(), (one for one in [x]))
    assert found.shape == x.shape


def test_an_edge_of_the_graph_for_an_input(model):
    x = X.clone().requires_grad_()
    edge = torch.autograd.graph.get_gradient_edge(x)
    model(x).float().sum().backward(inputs=edge)
    assert x.grad is not None and model[0].weight.grad is None
    (found,) = torch.autograd.grad(model(x).float().sum(), edge)
    assert torch.equal(found, x.grad)


def test_grad_of_what_is_not_in_the_graph(model):
    other = nn.Parameter(torch.ones(2))
    loss_of(model).backward()
    inputs = [model[0].weight, other, model[2].weight]
    loss = model[0](X).float().pow(2).sum()
    with pytest.raises(RuntimeError, match="allow_unused"):
        torch.autograd.grad(loss, inputs, retain_graph=True)
    first, second, third = torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=True)
    assert first is not None and second is None and third is None
    found = torch.autograd.grad(loss, inputs, materialize_grads=True)
    assert torch.equal(found[1], torch.zeros(2)) and found[2].shape == (3, 6)


def test_grad_of_a_batch(model):
    out = model(X).float().sum(0)
    weights = list(model.parameters())
    batched = torch.autograd.grad(
        out, weights, torch.eye(3), retain_graph=True, is_grads_batched=True
    )
    for row in range(3):
        single = torch.autograd.grad(out[row], weights, retain_graph=True)
        for one, many in zip(single, batched, strict=True):
            torch.testing.assert_close(many[row], one, rtol=2**-7, atol=2**-7)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph:UserWarning")
@pytest.mark.parametrize("way", ["grad", "backward"])
def test_a_penalty_on_the_gradient(model, way):
    """Second derivatives: the first with a graph, then a backward pass through it."""

    def penalty(model, loss):
        if way == "grad":
            first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        else:
            loss.backward(create_graph=True)
            first = grads(model)
            assert all(one.requires_grad for one in first[:3])
            for parameter in model.parameters():
                parameter.grad = None
        sum(one.pow(2).sum() for one in first).backward()
        return grads(model)

    found = penalty(model, loss_of(model))
    reference = network()
    with ampatch.disable_casts():
        expected = penalty(reference, loss_of(reference))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * other.abs().max().item())


def test_backward_to_some_inputs(model):
    loss_of(model).backward(inputs=[model[0].weight, model[2].bias])
    expected = plain_grads()
    assert torch.equal(model[0].weight.grad, expected[0])
    assert torch.equal(model[2].bias.grad, expected[3])
    assert model[0].bias.grad is None and model[2].weight.grad is None
    model.zero_grad()
    torch.autograd.backward([loss_of(model)], inputs=model[0].bias)
    assert torch.equal(model[0].bias.grad, expected[1]) and model[0].weight.grad is None


# Transforms, modes and what this torch lacks


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_forward_mode_ad(model):
    tangents = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    loss_of(model).backward()

    def derivative(model):
        with forward_ad.dual_level():
            duals = {
                name: forward_ad.make_dual(p.detach(), tangents[name])
                for name, p in model.named_parameters()
            }
            out = torch.func.functional_call(model, duals, (X,))
            return forward_ad.unpack_dual(out.float().sum()).tangent

    found = derivative(model)
    with ampatch.disable_casts():
        expected = derivative(network())
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_func_grad_of_the_weights(model):
    loss_of(model).backward()
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights):
        return torch.func.functional_call(model, weights, (X,)).float().pow(2).sum()

    found = torch.func.grad(loss)(weights)
    assert_equal(list(found.values()), plain_grads())


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_evaluation_before_training(model, first):
    with first():
        model(X)
        model(X)
    loss_of(model).backward()
    assert_equal(grads(model), plain_grads())
    with first():
        out = model(X)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert torch.equal(out, network()(X))


def behind_each_layer(model) -> list[list[tuple]]:
    """The shapes of the weights behind the cast nodes of each layer, as libraries look for them."""
    layers: dict = {}
    handles = [
        layer.register_forward_hook(lambda layer, args, out: layers.update({out.grad_fn: layer}))
        for layer in (model[0], model[2])
    ]
    model(X)
    for handle in handles:
        handle.remove()
    found = []
    for node in layers:
        waiting = [inner for inner, _ in node.next_functions if "Tanh" not in str(inner)]
        shapes = []
        while waiting:
            inner = waiting.pop()
            if hasattr(inner, "variable"):
                shapes.append(tuple(inner.variable.shape))
            elif inner is not None:
                waiting += [further for further, _ in inner.next_functions]
        found.append(sorted(shapes))
    return found


def test_in_evaluation_mode_a_graph_leads_from_each_layer_to_its_own_weights(model):
    """torch-pruning and its like walk it so, and find an IndexError where it leads to others."""
    loss_of(model).backward()
    model.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = behind_each_layer(network().eval())
    assert behind_each_layer(model) == expected == [[(6,), (6, 4)], [(3,), (3, 6)]]
    model.zero_grad()
    loss_of(model).backward()
    assert_equal(grads(model), plain_grads())


def test_without_private_names_of_torch(model, monkeypatch):
    monkeypatch.setattr(batched_casts, "HOOKS_CAN_BE_SEEN", False)
    loss_of(model).backward()
    assert_equal(grads(model), plain_grads())


def test_weights_of_other_kinds_are_cast_in_the_graph(model):
    half = nn.Parameter(torch.ones(3, 4, dtype=torch.float16))
    large = nn.Parameter(torch.ones(2**14 + 1, 4))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.narrow, self.large = half, large

        def forward(self, x):
            return F.linear(x, self.narrow).float().sum() + F.linear(x, self.large).float().sum()

    other = ampatch.initialize(Model(), opt_level="O1", dtype=torch.bfloat16, verbosity=0)
    other(X).backward()
    assert half.grad.dtype is torch.float16 and large.grad.dtype is torch.float32


def test_a_default_argument_bound_early(model):
    def gradients(loss, inputs, grad=torch.autograd.grad):
        return grad(loss, inputs)

    assert torch.equal(gradients(loss_of(model), [model[0].weight])[0], plain_grads()[0])


@pytest.mark.parametrize(
    "other",
    [
        lambda data: data.t(),
        lambda data: data.reshape(data.shape[1], data.shape[0]),
        lambda data: data[:1],
        lambda data: data.reshape(-1),
    ],
    ids=["transposed", "reshaped", "first row", "flat"],
)
def test_a_weight_whose_data_took_another_shape_is_cast_as_it_is_now(other):
    """In the same memory, so that its pointer does not tell."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 4, bias=False)
    ampatch.initialize(layer, opt_level="O1", dtype=torch.bfloat16, verbosity=0)
    for _ in range(2):
        layer(torch.ones(1, 3)).sum().backward()
        layer.weight.grad = None
    layer.weight.data = other(layer.weight.data)
    now = layer.weight.detach().bfloat16()
    x = torch.ones(1, now.shape[-1])
    assert torch.equal(layer(x), F.linear(x.bfloat16(), now))
    assert torch.equal(layer(x), F.linear(x.bfloat16(), now))
