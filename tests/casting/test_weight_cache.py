"""A weight is cast at most once per forward, and a stale copy is never used."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ampatch
from ampatch.casting.weight_cache import WeightCache


class CountCasts(TorchDispatchMode):
    """Counts dtype casts of tensors of one shape."""

    def __init__(self, shape) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += 1
        elif function is torch.ops.aten._foreach_copy_.default:  # natively, a batch of one too
            self.count += sum(one.shape == self.shape for one in args[1])
        return function(*args, **(kwargs or {}))


class Twice(nn.Module):
    """Uses one weight twice; `between` runs in the middle of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.between = lambda: None

    def forward(self, x):
        x = F.linear(x, self.weight)
        self.between()
        return F.linear(x, self.weight)


X = torch.ones(3, 4)


@pytest.fixture
def model():
    return ampatch.initialize(Twice(), opt_level="O1", dtype=torch.bfloat16, verbosity=0)


def result(model) -> float:
    """What the weight multiplied by: the square of its scale, for a scaled identity."""
    return model(X).float().mean().item()


@pytest.mark.parametrize("grad", [True, False])
def test_a_weight_used_twice_is_cast_once(model, grad):
    with torch.set_grad_enabled(grad), CountCasts(model.weight.shape) as casts:
        model(X)
        assert casts.count == 1
        model(X)
    assert casts.count == 2
    # The second forward begins with the copy, which both its uses find.
    assert ampatch.cache_info().hits == 3 and ampatch.cache_info().misses == 2


def test_outside_a_forward_nothing_is_kept(model):
    F.linear(X, model.weight)
    assert ampatch.cache_info().misses == 0 and ampatch.cache_info().entries == 0


def swap_data(model):
    model.weight.data.mul_(2)  # raises no version


def copy_data(model):
    model.weight.data.copy_(2 * torch.eye(4))


def new_data(model):
    model.weight.data = 2 * torch.eye(4)


def load(model):
    model.load_state_dict({"weight": 2 * torch.eye(4)})


def in_place(model):
    with torch.no_grad():
        model.weight.mul_(2)


@pytest.mark.parametrize("change", [swap_data, copy_data, new_data, load, in_place])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_change_between_forwards_is_seen(model, change, mode):
    with mode():
        assert result(model) == 1
    change(model)
    with mode():
        assert result(model) == 4


@pytest.mark.parametrize("change", [in_place, new_data, load])
def test_a_change_within_a_forward_is_seen(model, change):
    model.between = lambda: change(model)
    with torch.no_grad():
        assert result(model) == 2  # 1 before, 2 after


def test_grad_mode_switched_within_a_forward():
    class Teacher(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self, x):
            with torch.no_grad():
                target = F.linear(x, self.weight)
            return F.linear(x, self.weight) - target / 2

    teacher = ampatch.initialize(Teacher(), dtype=torch.bfloat16, verbosity=0)
    teacher(X).float().sum().backward()
    assert teacher.weight.grad.abs().sum() > 0


def test_evaluations_keep_nothing(model):
    import gc

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    with torch.no_grad():
        model(X)
        before = tensors()
        for _ in range(100):
            model(X)
    # Fewer is fine: the collector may find what an earlier test left.
    assert ampatch.cache_info().entries == 0 and tensors() <= before


def test_an_exception_in_forward_leaves_it_closed(model):
    def fail():
        raise KeyError("user's own")

    model.between = fail
    with pytest.raises(KeyError):
        model(X)
    info = ampatch.cache_info()
    assert info.entries == 0
    F.linear(X, model.weight)
    assert ampatch.cache_info().misses == info.misses  # closed
    assert F.linear(X, model.weight).dtype is torch.bfloat16
    model.between = lambda: None
    swap_data(model)
    assert result(model) == 4


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_trace_does_not_bake_the_copy_in(model):
    with torch.no_grad():
        traced = torch.jit.trace(model, X, check_trace=False)
        assert ampatch.cache_info().misses == 0  # closed while tracing
        assert traced(X).float().mean() == 1
        swap_data(model)
        assert traced(X).float().mean() == 4


def test_a_forward_interrupted_past_its_hooks_leaves_nothing_stale():
    """Ctrl-C skips forward hooks, so the next forward finds the cache still open."""
    cache, weight = WeightCache(), nn.Parameter(torch.ones(2))
    cache.open("model")
    cache.cast(weight, torch.bfloat16)
    weight.data.mul_(2)
    cache.open("model")
    assert torch.equal(cache.cast(weight, torch.bfloat16).float(), weight)


def test_a_transform_within_a_forward_leaves_no_tensor_of_its_level():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self, x):
            slope = torch.func.grad(lambda x: F.linear(x, self.weight).float().sum())(x)
            return F.linear(x, self.weight) + slope

    model = ampatch.initialize(Inner(), dtype=torch.bfloat16, verbosity=0)
    out = model(X)
    assert torch.equal(out.float(), 2 * X)
    out.float().sum().backward()
    assert torch.equal(model.weight.grad, torch.full((4, 4), 6.0))  # 3 rows, and 3 slopes
    assert ampatch.cache_info().hits == 0  # the transform's own cast was not kept
