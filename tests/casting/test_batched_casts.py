"""Weights cast in batches at O1: who looks into the graph or a backward pass sees autocast's.

What a training loop can show of it is in `tests/laws/situations_*.py`.
"""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from operators import Operators
from small_training import Made, in_threads
from torch import nn

import ampatch

H = torch.bfloat16
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)  # dtypes too


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def managed(model: nn.Module) -> nn.Module:
    return ampatch.initialize(model, opt_level="O1", dtype=H, verbosity=0)


@pytest.fixture
def model():
    return managed(network())


def loss_of(model, x=X) -> torch.Tensor:
    return model(x).float().pow(2).sum()


def grads(model) -> list:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def under_autocast() -> nn.Module:
    """The network, called under torch.autocast."""
    return Made(torch.autocast("cpu", dtype=H)(lambda self, x: self.model(x)), model=network())


def autocast_grads() -> list:
    """torch.autocast's gradients of the same network."""
    model = under_autocast()
    loss_of(model).backward()
    return grads(model)


@pytest.mark.parametrize("change", ["hook", "frozen", "nothing"])
def test_without_a_graph_nothing_splits_a_bucket(model, change):
    loss_of(model)
    called = []
    if change == "hook":
        model[2].weight.register_hook(called.append)
    elif change == "frozen":
        model[0].weight.requires_grad_(False)
    plain = network()
    with torch.autocast("cpu", dtype=H), torch.no_grad():
        expected = plain(X)
    with torch.no_grad(), Operators() as operators:
        output = model(X)
    assert operators.seen.count(torch.ops.aten._foreach_copy_.default) == 1  # the weights
    assert operators.seen.count(torch.ops.aten._to_copy.default) == 1  # the input
    assert torch.equal(output, expected) and not called


def test_threads_that_share_a_model(model):
    loss_of(model).backward()
    model.zero_grad()
    results = in_threads(*[lambda: [loss_of(model).backward() for _ in range(25)]] * 4)
    assert results == [[None] * 25] * 4
    for grad, expected in zip(grads(model), autocast_grads(), strict=True):
        torch.testing.assert_close(grad, 100 * expected, rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize("end", ["deactivate", "relevel", "delete", "disable"])
def test_a_backward_pass_after_the_end_fills_grad(model, end):
    """Hooks that are added by then see it too."""
    loss_of(model).backward()
    model.zero_grad()
    parameters, loss, seen = list(model.parameters()), loss_of(model), []
    if end == "deactivate":
        ampatch.deactivate()
    elif end == "relevel":
        ampatch.initialize(model, opt_level="O0", verbosity=0)
    elif end == "delete":
        del model
        managed(nn.Linear(1, 1))
    else:
        ampatch.initialize(model, enabled=False, verbosity=0)
    parameters[0].register_hook(lambda grad: seen.append(grad.clone()))
    parameters[0].register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad))
    loss.backward()
    expected = autocast_grads()
    assert_equal([parameter.grad for parameter in parameters], expected)
    assert_equal(seen, expected[:1] * 2)


def test_weights_go_when_their_model_lets_go_of_them(model):
    def step(model=model):
        for _ in range(2):
            model.zero_grad()
            loss_of(model).backward()

    step()
    old = weakref.ref(model[2].weight)
    model[2] = network()[2]
    step()
    gc.collect()
    assert old() is None
    for name in ("0", "2"):  # all of them, by as many
        setattr(model, name, network()[int(name)])
    step()
    assert_equal(grads(model), autocast_grads())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_arrive_while_earlier_layers_are_computed(level):
    """A node made as the forward begins would run last, and half gradients would wait for it."""
    torch.manual_seed(0)
    model, there = nn.Sequential(*(nn.Linear(4, 4) for _ in range(80))), []  # several buckets
    ampatch.initialize(model, opt_level=level, dtype=H, verbosity=0)
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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of torch's own
def test_compiled_autograd(model):
    import torch._dynamo.compiled_autograd as compiled

    enable = getattr(compiled, "_enable", None) or compiled.enable
    compiler = torch.compile(backend="aot_eager")
    for _ in range(2):  # the second begins with the weights that the first has cast
        model.zero_grad()
        with enable(compiler):
            loss_of(model).backward()
        assert_equal(grads(model), autocast_grads())


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
    buckets = []
    for node in layers:
        waiting = [inner for inner, _ in node.next_functions if "Tanh" not in str(inner)]
        shapes = []
        while waiting:
            inner = waiting.pop()
            if hasattr(inner, "variable"):
                shapes.append(tuple(inner.variable.shape))
            elif inner is not None:
                waiting += [further for further, _ in inner.next_functions]
        buckets.append(sorted(shapes))
    return buckets


def test_in_evaluation_mode_a_graph_leads_from_each_layer_to_its_own_weights(model):
    """torch-pruning and its like walk it so, and find an IndexError where it leads to others."""
    loss_of(model).backward()
    model.eval()
    with torch.autocast("cpu", dtype=H):
        expected = behind_each_layer(network().eval())
    assert behind_each_layer(model) == expected == [[(6,), (6, 4)], [(3,), (3, 6)]]


def test_half_and_large_weights_are_cast_in_the_graph():
    def forward(self, x):
        return F.linear(x, self.narrow).float().sum() + F.linear(x, self.large).float().sum()

    narrow = nn.Parameter(torch.ones(3, 4, dtype=torch.float16))
    model = managed(Made(forward, narrow=narrow, large=nn.Parameter(torch.ones(2**14 + 1, 4))))
    for _ in range(2):
        model(X).backward()
    assert model.narrow.grad.dtype is torch.float16 and model.large.grad.dtype is torch.float32


def test_a_model_made_double_is_left_alone(model):
    """Half way: the conversion is refused, and a weight given other data is cast no more."""
    loss_of(model).backward()
    with pytest.raises(ampatch.errors.AmpatchError, match="float64"):
        model.double()
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    assert model(X.double()).dtype is torch.float64
