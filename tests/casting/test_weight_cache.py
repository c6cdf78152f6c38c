"""A weight is cast at most once per forward, in batches, and a stale copy is never used.

Who looks into the graph or a backward pass sees autocast's casts.  What a training loop can show of
it is in `tests/laws/situations_*.py`.
"""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from operators import Operators
from small_training import Made, in_threads, step
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampatch

H = torch.bfloat16
X = torch.ones(3, 4)


class CountCasts(Operators):
    """Counts dtype casts of tensors of one shape."""

    def __init__(self, shape) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def look(self, function, args):
        if function is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += 1
        elif function is torch.ops.aten._foreach_copy_.default:  # natively, a batch of one too
            self.count += sum(tensor.shape == self.shape for tensor in args[1])


def twice():
    """Uses one weight twice; `between` runs in the middle of the forward."""

    def forward(self, x):
        x = F.linear(x, self.weight)
        self.between()
        return F.linear(x, self.weight)

    return Made(forward, weight=nn.Parameter(torch.eye(4)), between=lambda: None)


def managed(model, **options):
    return ampatch.initialize(model, opt_level="O1", dtype=H, verbosity=0, **options)


@pytest.fixture
def used_twice():
    return managed(twice())


def result(model) -> float:
    """What the weight multiplied by: the square of its scale, for a scaled identity."""
    return model(X).float().mean().item()


@pytest.mark.parametrize("grad", [True, False])
def test_a_weight_used_twice_is_cast_once(used_twice, grad):
    F.linear(X, used_twice.weight)  # outside of a forward nothing is kept
    assert ampatch.cache_info().misses == 0 and ampatch.cache_info().entries == 0
    with torch.set_grad_enabled(grad), CountCasts(used_twice.weight.shape) as casts:
        used_twice(X)
        assert casts.count == 1
        used_twice(X)
    assert casts.count == 2
    # The second forward begins with the copy, which both its uses find.
    assert ampatch.cache_info().hits == 3 and ampatch.cache_info().misses == 2


def swap_data(model):
    model.weight.data.mul_(2)  # raises no version


def new_data(model):
    model.weight.data = 2 * torch.eye(4)


def load(model):
    model.load_state_dict({"weight": 2 * torch.eye(4)})


def in_place(model):
    with torch.no_grad():
        model.weight.mul_(2)


def in_a_checkpoint(model):
    checkpoint(swap_data, model, use_reentrant=False)


@pytest.mark.parametrize("change", [in_place, new_data, load, in_a_checkpoint])
def test_a_change_within_a_forward_is_seen(used_twice, change):
    used_twice.between = lambda: change(used_twice)
    with torch.no_grad():
        assert result(used_twice) == 2  # 1 before, 2 after


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_forward_that_ends_early_leaves_nothing_stale(used_twice, error):
    """Ctrl-C skips forward hooks, so the next forward finds the cache still open."""

    def fail():
        raise error

    used_twice.between = fail
    with pytest.raises(error):
        used_twice(X)
    info = ampatch.cache_info()
    assert error is KeyboardInterrupt or info.entries == 0
    F.linear(X, used_twice.weight)
    assert ampatch.cache_info().misses == info.misses
    used_twice.between = lambda: None
    swap_data(used_twice)
    assert result(used_twice) == 4 and ampatch.cache_info().entries == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_trace_does_not_bake_the_copy_in(used_twice):
    with torch.no_grad():
        traced = torch.jit.trace(used_twice, X, check_trace=False)
        assert ampatch.cache_info().misses == 0  # closed while tracing
        assert traced(X).float().mean() == 1
        swap_data(used_twice)
        assert traced(X).float().mean() == 4


def test_a_transform_within_a_forward_leaves_no_tensor_of_its_level():
    def forward(self, x):
        slope = torch.func.grad(lambda x: F.linear(x, self.weight).float().sum())(x)
        return F.linear(x, self.weight) + slope

    model = managed(Made(forward, weight=nn.Parameter(torch.eye(4))))
    out = model(X)
    assert torch.equal(out.float(), 2 * X)
    out.float().sum().backward()
    assert torch.equal(model.weight.grad, torch.full((4, 4), 6.0))  # 3 rows, and 3 slopes
    assert ampatch.cache_info().hits == 0  # the transform's own cast was not kept


def test_a_copy_of_inference_mode_is_not_saved_for_a_backward_pass():
    def forward(self, x):
        F.linear(x, self.weight)
        with torch.inference_mode(False), torch.enable_grad():
            y = X.clone().requires_grad_()
            return torch.autograd.grad(F.linear(y, self.weight).float().sum(), y)

    weight = nn.Parameter(torch.eye(4), requires_grad=False)
    model = managed(Made(forward, weight=weight))
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(*model(X), X)


# Weights that change in ways that autograd does not count


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("rows", [slice(None, 5), slice(2, 7)], ids=["first", "middle"])
def test_pruned_weights_get_gradients_of_their_new_shape(level, rows):
    """`data[:5]` keeps the pointer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level=level, dtype=H, verbosity=0)

    def one_step():
        step(model(torch.ones(3, 8)).float().square().mean(), optimizer)

    one_step()
    one_step()
    optimizer.zero_grad()
    for parameter in (model[-1].weight, model[-1].bias):
        parameter.data = parameter.data[rows]
    for master in list(ampatch.master_params(optimizer))[-2:]:
        if master.shape[0] == 10:
            master.data = master.data[rows]
    for _ in range(2):
        one_step()
        assert [p.grad.shape[0] for p in list(ampatch.master_params(optimizer))[-2:]] == [5, 5]


@pytest.mark.parametrize("is_managed", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_steps_within_the_forward(fused, is_managed):
    """Test-time training; a fused optimizer raises no versions."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(4, 4)
            self.optimizer = self.own_optimizer()

        def own_optimizer(self):
            return torch.optim.SGD(self.net.parameters(), 0.1, fused=fused)

        def forward(self, x):
            optimizer, losses = self.optimizer, []
            for _ in range(4):
                optimizer.zero_grad()
                loss = (self.net(x) - x).float().pow(2).mean()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    losses += [loss.item(), self.net(x).float().sum().item()]
            return losses

    x = torch.linspace(-1, 1, 12).view(3, 4)
    with torch.autocast("cpu", dtype=H, cache_enabled=False):
        expected = Inner()(x)
    assert len(set(expected)) == 8
    model = Inner()
    if is_managed:
        ampatch.initialize(model, model.optimizer, dtype=H, loss_scale=1.0, verbosity=0)
    else:
        managed(model)
    assert model(x) == expected
    model.net.load_state_dict(Inner().net.state_dict())
    assert model(x) == expected


def test_another_memory_format_is_followed():
    model, x = managed(nn.Conv2d(3, 8, 3)), torch.randn(2, 3, 7, 7)
    model(x)
    model.to(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=H):
        expected = F.conv2d(x, model.weight, model.bias)
    for _ in range(2):
        assert model(x).stride() == expected.stride()


def test_a_model_within_another_one_uses_its_copies():
    inner = twice()
    outer = nn.Sequential(inner, inner)
    managed([outer, inner])
    x = torch.ones(3, 4)
    for _ in range(2):
        before = ampatch.cache_info().misses
        outer(x)
        assert ampatch.cache_info().misses == before + 1


INPUTS = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)  # dtypes too


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


@pytest.fixture
def model():
    return managed(network())


def loss_of(model, x=INPUTS) -> torch.Tensor:
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
        expected = plain(INPUTS)
    with torch.no_grad(), Operators() as operators:
        output = model(INPUTS)
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
    model(INPUTS)
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
        model(INPUTS).backward()
    assert model.narrow.grad.dtype is torch.float16 and model.large.grad.dtype is torch.float32


def test_a_model_made_double_is_left_alone(model):
    """Half way: the conversion is refused, and a weight given other data is cast no more."""
    loss_of(model).backward()
    with pytest.raises(ampatch.errors.AmpatchError, match="float64"):
        model.double()
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    assert model(INPUTS.double()).dtype is torch.float64
