"""A weight is cast at most once per forward, and a stale copy is never used.

What a training loop can show of it is in `tests/laws/situations_weights.py`.
"""

import pytest
import torch
import torch.nn.functional as F
from operators import Operators
from small_training import Made, step
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
def model():
    return managed(twice())


def result(model) -> float:
    """What the weight multiplied by: the square of its scale, for a scaled identity."""
    return model(X).float().mean().item()


@pytest.mark.parametrize("grad", [True, False])
def test_a_weight_used_twice_is_cast_once(model, grad):
    F.linear(X, model.weight)  # outside of a forward nothing is kept
    assert ampatch.cache_info().misses == 0 and ampatch.cache_info().entries == 0
    with torch.set_grad_enabled(grad), CountCasts(model.weight.shape) as casts:
        model(X)
        assert casts.count == 1
        model(X)
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
def test_a_change_within_a_forward_is_seen(model, change):
    model.between = lambda: change(model)
    with torch.no_grad():
        assert result(model) == 2  # 1 before, 2 after


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_forward_that_ends_early_leaves_nothing_stale(model, error):
    """Ctrl-C skips forward hooks, so the next forward finds the cache still open."""

    def fail():
        raise error

    model.between = fail
    with pytest.raises(error):
        model(X)
    info = ampatch.cache_info()
    assert error is KeyboardInterrupt or info.entries == 0
    F.linear(X, model.weight)
    assert ampatch.cache_info().misses == info.misses
    model.between = lambda: None
    swap_data(model)
    assert result(model) == 4 and ampatch.cache_info().entries == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_trace_does_not_bake_the_copy_in(model):
    with torch.no_grad():
        traced = torch.jit.trace(model, X, check_trace=False)
        assert ampatch.cache_info().misses == 0  # closed while tracing
        assert traced(X).float().mean() == 1
        swap_data(model)
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
