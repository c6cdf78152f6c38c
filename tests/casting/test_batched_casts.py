"""Weights cast in the graph, in batches: `parameter.grad` is what torch.autocast makes it.

What looks into a backward pass meets the weights themselves, in FP32.  What a training loop can
show of it is in `tests/laws/situations_*.py`.
"""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import ampatch
from ampatch.casting import batched_casts

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


@pytest.fixture
def model():
    return ampatch.initialize(network(), opt_level="O1", dtype=torch.bfloat16, verbosity=0)


def grads(model) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def autocast_grads(loss_of=lambda model: model(X).float().pow(2).sum(), model=None):
    """torch.autocast's gradients of the same network."""
    model = network() if model is None else model
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model)
    loss.backward()
    return grads(model)


def loss_of(model) -> torch.Tensor:
    return model(X).float().pow(2).sum()


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is torch.float32 and torch.equal(one, other)


def test_gradients_add_up_in_float32(model):
    plain = network()
    for _ in range(3):
        loss_of(model).backward()
        autocast_grads(model=plain)
    assert_equal(grads(model), grads(plain))
    for parameter in model.parameters():
        parameter.grad.zero_()
    loss_of(model).backward()
    assert_equal(grads(model), autocast_grads())


def test_many_forwards_before_one_backward_add_up_in_float32():
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, 1))

        def forward(self, x):
            return F.linear(x, self.weight)

    model = ampatch.initialize(One(), opt_level="O1", dtype=torch.bfloat16, verbosity=0)
    sum(model(torch.ones(1, 1)).float().sum() for _ in range(1000)).backward()
    assert model.weight.grad.item() == pytest.approx(1000, abs=2)  # bfloat16 stops at 256


def test_forwards_without_a_backward_pass_spoil_nothing(model):
    for _ in range(10):
        model(X)
    loss_of(model).backward()
    model.zero_grad()
    loss_of(model).backward()
    assert_equal(grads(model), autocast_grads())


class _Casts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.batched, self.alone = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.batched += function is torch.ops.aten._foreach_copy_.default
        self.alone += function is torch.ops.aten._to_copy.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("change", ["hook", "frozen", "nothing"])
def test_without_a_graph_nothing_splits_a_bucket(model, change):
    loss_of(model)
    called = []
    if change == "hook":
        model[2].weight.register_hook(called.append)
    elif change == "frozen":
        model[0].weight.requires_grad_(False)
    plain = network()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        expected = plain(X)
    with torch.no_grad(), _Casts() as casts:
        found = model(X)
    assert (casts.batched, casts.alone) == (1, 1)  # the weights, the input
    assert torch.equal(found, expected) and not called


def test_frozen_between_forward_and_backward(model):
    loss = loss_of(model)
    model[0].requires_grad_(False)
    loss.backward()
    assert model[0].weight.grad is None and model[2].weight.grad is not None


def test_a_model_made_double_is_left_alone(model):
    """Half way: the conversion is refused, and a weight given other data is cast no more."""
    loss_of(model).backward()
    with pytest.raises(ampatch.errors.AmpatchError, match="float64"):
        model.double()
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    assert model(X.double()).dtype is torch.float64


def test_retained_graphs(model):
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()
    assert_equal(grads(model), [2 * grad for grad in autocast_grads()])


def test_threads_that_share_a_model(model):
    loss_of(model).backward()
    model.zero_grad()
    barrier = threading.Barrier(4)

    def work():
        barrier.wait()
        for _ in range(25):
            loss_of(model).backward()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found, expected in zip(grads(model), autocast_grads(), strict=True):
        torch.testing.assert_close(found, 100 * expected, rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize("end", ["deactivate", "relevel", "delete", "disable"])
def test_a_backward_pass_after_the_end_fills_grad(model, end):
    loss_of(model).backward()
    model.zero_grad()
    parameters, loss = list(model.parameters()), loss_of(model)
    if end == "deactivate":
        ampatch.deactivate()
    elif end == "relevel":
        ampatch.initialize(model, opt_level="O0", verbosity=0)
    elif end == "delete":
        del model
        ampatch.initialize(nn.Linear(1, 1), opt_level="O1", dtype=torch.bfloat16, verbosity=0)
    else:
        ampatch.initialize(model, enabled=False, verbosity=0)
    loss.backward()
    assert_equal([parameter.grad for parameter in parameters], autocast_grads())


def test_weights_go_when_their_model_lets_go_of_them():
    model = ampatch.initialize(network(), opt_level="O1", dtype=torch.bfloat16, verbosity=0)
    for _ in range(2):
        loss_of(model).backward()
    old = weakref.ref(model[2].weight)
    model[2] = nn.Linear(6, 3)
    loss_of(model).backward()
    gc.collect()
    assert old() is None
    loss_of(model).backward()
    others = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert all(other() is None for other in others)


def test_weights_all_replaced_by_as_many():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, x):
            return self.body(x)

    model = ampatch.initialize(Holder(), opt_level="O1", dtype=torch.bfloat16, verbosity=0)
    for _ in range(3):
        for _ in range(2):
            loss_of(model).backward()
        model.body = network()
    loss_of(model).backward()
    assert_equal(grads(model), autocast_grads())


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_no_level_touches_the_backward_pass(level):
    before = torch.autograd.backward, torch.autograd.grad
    ampatch.initialize(network(), opt_level=level, dtype=torch.bfloat16, verbosity=0)
    assert before == (torch.autograd.backward, torch.autograd.grad)


# What looks into a backward pass


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
    assert_equal(grads(model), autocast_grads())


def test_ranks_that_talk(model, tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    try:
        loss_of(model).backward()
    finally:
        torch.distributed.destroy_process_group()
    assert_equal(grads(model), autocast_grads())


# torch.autograd.grad


def test_grad_of_parameters_as_a_generator(model):
    """As everybody writes it: `autograd.grad(loss, model.parameters())`."""
    assert_equal(torch.autograd.grad(loss_of(model), model.parameters()), autocast_grads())
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss_of(model), named.values(), allow_unused=True)
    assert_equal(found, autocast_grads())
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


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_evaluation_before_training(model, first):
    with first():
        model(X)
        model(X)
    loss_of(model).backward()
    assert_equal(grads(model), autocast_grads())
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
    assert_equal(grads(model), autocast_grads())


def test_without_private_names_of_torch(model, monkeypatch):
    monkeypatch.setattr(batched_casts, "HOOKS_CAN_BE_SEEN", False)
    loss_of(model).backward()
    assert_equal(grads(model), autocast_grads())


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
