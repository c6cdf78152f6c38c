"""Weights cast in the graph, in batches: `parameter.grad` is what torch.autocast makes it."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ampatch

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


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


def test_a_backward_pass_fills_grad(model):
    loss_of(model).backward()
    assert_equal(grads(model), autocast_grads())


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


def test_two_forwards_wait_for_one_backward(model):
    def both(model):
        return model(X).float().pow(2).sum() + model(2 * X).float().sum()

    both(model).backward()
    for found, expected in zip(grads(model), autocast_grads(both), strict=True):
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)


def test_a_forward_between_forward_and_backward_spoils_nothing(model):
    loss = loss_of(model)
    model(3 * X)
    loss.backward()
    assert_equal(grads(model), autocast_grads())


def test_a_step_between_forward_and_backward_leaves_the_graph_its_weights(model):
    """As under torch.autocast: the graph holds half copies, which belong to its forward."""
    loss_of(model)
    loss = loss_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    loss_of(model)
    loss.backward()
    assert_equal(grads(model), autocast_grads())


@pytest.mark.parametrize("how", ["data", "swap", "in_place", "load"])
def test_a_change_between_forwards_is_seen(model, how):
    loss_of(model).backward()
    model.zero_grad()
    state = {name: 2 * value for name, value in model.state_dict().items()}
    plain = network()
    plain.load_state_dict(state)
    for name, parameter in model.named_parameters():
        if how == "data":
            parameter.data.copy_(state[name])
        elif how == "swap":
            parameter.data = state[name].clone()
        elif how == "in_place":
            with torch.no_grad():
                parameter.copy_(state[name])
    if how == "load":
        model.load_state_dict(state)
    loss_of(model).backward()
    assert_equal(grads(model), autocast_grads(model=plain))


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


def test_frozen_weights_get_nothing_and_thawed_ones_do(model):
    loss_of(model).backward()
    model.zero_grad()
    model[0].requires_grad_(False)
    loss_of(model).backward()
    assert model[0].weight.grad is None and model[2].weight.grad is not None
    model.zero_grad()
    model[0].requires_grad_(True)
    loss_of(model).backward()
    assert_equal(grads(model), autocast_grads())


def test_frozen_between_forward_and_backward(model):
    loss = loss_of(model)
    model[0].requires_grad_(False)
    loss.backward()
    assert model[0].weight.grad is None and model[2].weight.grad is not None


def test_a_weight_cut_short_in_place(model):
    loss_of(model).backward()
    model.zero_grad()
    last = model[2]
    last.weight.data, last.bias.data = last.weight.data[:1], last.bias.data[:1]
    loss_of(model).backward()
    assert last.weight.grad.shape == (1, 6)


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


def test_a_backward_pass_that_fails_leaves_what_plain_torch_leaves(model):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("half-way")

    with pytest.raises(KeyError):
        model[2](Fails.apply(model[0](X))).float().sum().backward()
    assert model[2].weight.grad is not None  # reached before the failure
    model.zero_grad()
    loss_of(model).backward()
    assert_equal(grads(model), autocast_grads())


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


@pytest.mark.filterwarnings("ignore:.*cpu.amp.autocast:FutureWarning")  # torch 2.4's own
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=reentrant)

    model = ampatch.initialize(Checkpointed(), opt_level="O1", dtype=torch.bfloat16, verbosity=0)
    for _ in range(2):
        model.zero_grad()
        model(X.clone().requires_grad_()).float().pow(2).sum().backward()
        assert_equal(grads(model), autocast_grads())


@pytest.mark.parametrize("end", ["deactivate", "relevel", "delete", "disable"])
def test_a_backward_pass_after_the_end_fills_grad(model, end):
    loss_of(model).backward()
    model.zero_grad()
    parameters, loss = list(model.parameters()), loss_of(model)
    if end == "deactivate":
        ampatch.deactivate()
    elif end == "relevel":
        ampatch.set_opt_level(model, "O0")
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


def test_weights_made_anew_in_every_forward():
    class Hyper(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept, self.weight = nn.Linear(4, 4), None

        def forward(self, x):
            self.weight = None
            self.weight = nn.Parameter(torch.eye(4))
            return F.linear(self.kept(x), self.weight)

    model = ampatch.initialize(Hyper(), opt_level="O1", dtype=torch.bfloat16, verbosity=0)
    for _ in range(4):
        loss_of(model).backward()
        assert model.weight.grad is not None


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_no_level_touches_the_backward_pass(level):
    before = torch.autograd.backward, torch.autograd.grad
    ampatch.initialize(network(), opt_level=level, dtype=torch.bfloat16, verbosity=0)
    assert before == (torch.autograd.backward, torch.autograd.grad)
