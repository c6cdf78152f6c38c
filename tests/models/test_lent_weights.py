"""Half copies of weights in the places of FP32 parameters, while a forward runs (O2)."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.utils.checkpoint import checkpoint

import ampatch

HALF = torch.bfloat16


class Net(nn.Module):
    """Notes the dtypes that its forward sees; calls `inside` there."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.inside = lambda model: None
        self.seen = []

    def encode(self, x):
        return torch.tanh(self.first(x))

    def forward(self, x):
        self.seen += [self.first.weight.dtype, x.dtype]
        hidden = self.encode(x)
        self.inside(self)
        return self.second(hidden)


def start(model=None, half=HALF, **settings):
    model = Net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=half, verbosity=0, **settings)
    return model, optimizer


def inputs(seed=1):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def is_float(model):
    entries = [one for m in model.modules() for one in m._parameters.values() if one is not None]
    assert all(type(one) is nn.Parameter and one.dtype is torch.float32 for one in entries)
    return True


def test_a_weight_is_the_optimizers_and_half_only_inside(half):
    before = list(Net().parameters())
    model, optimizer = start(half=half)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters()))
    out = model(inputs())
    assert model.seen == [half, half] and out.dtype is torch.float32 and is_float(model)
    with ampatch.scale_loss(out.sum(), optimizer) as scaled:
        scaled.backward()
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())


def test_a_part_called_from_outside():
    model, _ = start()
    assert model.encode(inputs()).dtype is HALF and is_float(model)
    with pytest.raises(RuntimeError, match="shapes"):
        model.first(torch.ones(3, 5))
    assert is_float(model)


def test_an_exception_in_the_forward_takes_the_copies_back():
    model, _ = start()
    model.inside = lambda model: 1 / 0
    with pytest.raises(ZeroDivisionError):
        model(inputs())
    assert is_float(model)


@pytest.mark.parametrize("then", ["forward", "scale_loss", "deactivate"])
def test_what_ctrl_c_leaves_is_taken_back(then):
    """It skips the forward hooks.  A weight that is loaded meanwhile counts."""
    model, optimizer = start()

    def interrupt(model):
        raise KeyboardInterrupt

    model.inside = interrupt
    with pytest.raises(KeyboardInterrupt):
        model(inputs())
    model.inside = lambda model: None
    if then == "forward":
        model(inputs())
    elif then == "scale_loss":
        with ampatch.scale_loss(torch.zeros(1, requires_grad=True).sum(), optimizer):
            pass
    else:
        ampatch.deactivate()
    assert is_float(model)


def test_threads_take_turns():
    """Each gets what it gets alone, and the parameters are back in the end."""
    model, _ = start()
    expected = [model(inputs(seed)) for seed in range(4)]
    found = [None] * 4
    entered = threading.Barrier(4)

    def work(seed):
        entered.wait()
        for _ in range(20):
            found[seed] = model(inputs(seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, found, expected)) and is_float(model)


def test_forwards_that_wait_for_each_other_are_an_error():
    one, two = Net(), Net()
    ampatch.initialize([one, two], opt_level="O2", dtype=HALF, verbosity=0)
    both = threading.Barrier(2)
    errors = []

    def inside(other):
        def call(model):
            model.inside = lambda model: None
            both.wait()
            other(inputs())

        return call

    def work(model):
        try:
            model(inputs())
        except ampatch.AmpatchError as error:
            errors.append(str(error))

    one.inside, two.inside = inside(two), inside(one)
    threads = [threading.Thread(target=work, args=(model,)) for model in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors and "which does not end" in errors[0] and "take turns" in errors[0]
    assert is_float(one) and is_float(two)


def test_a_model_inside_another_joins_it():
    """No casts between them: its output is half there, and FP32 when it is called by itself."""
    inner, first = start()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head, self.between = inner, nn.Linear(2, 2), None

        def forward(self, x):
            hidden = self.inner(x)
            self.between = hidden.dtype
            return self.head(hidden)

    outer, _second = start(Outer())
    assert outer(inputs()).dtype is torch.float32 and outer.between is HALF
    assert inner(inputs()).dtype is torch.float32
    assert is_float(outer)
    assert first.param_groups[0]["params"][0] is inner.first.weight


def test_a_layer_shared_by_two_models():
    one, two = Net(), Net()
    two.first = one.first
    for model in (one, two):
        start(model)
    for model in (one, two):
        assert model(inputs()).dtype is torch.float32
        assert model.seen == [HALF, HALF] and is_float(model)


def test_a_replaced_and_an_added_parameter_are_lent():
    model, _ = start()
    model(inputs())
    model.first.weight = nn.Parameter(torch.zeros(8, 4))
    model.second = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    seen = []
    model.inside = lambda model: seen.extend(p.dtype for p in model.parameters())
    model(inputs())
    assert set(seen) == {HALF} and is_float(model)


def test_a_parameter_that_the_forward_puts_in_place_stays():
    model, _ = start()
    new = nn.Parameter(torch.ones(8))
    model.inside = lambda model: setattr(model.first, "bias", new)  # it has been used
    model(inputs())
    assert model.first.bias is new and is_float(model)
    model(inputs()).sum().backward()
    assert new.grad is not None


@pytest.mark.parametrize("how", ["in place", "data"])
def test_a_write_within_the_forward_reaches_the_parameter(how):
    model, _ = start()
    before = copy.deepcopy(model.state_dict())

    def clamp(model):
        with torch.no_grad():
            weight = model.second.weight.data if how == "data" else model.second.weight
            weight.clamp_(-0.1, 0.1)

    for _ in range(2):
        model.inside = clamp
        model(inputs())
        inside = before["second.weight"].abs() <= 0.1
        assert torch.equal(model.second.weight[inside], before["second.weight"][inside])
        assert model.second.weight.abs().max() < 0.1005
        model.load_state_dict(before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_has_the_copies_of_its_forward(reentrant):
    class Checkpointed(Net):
        def forward(self, x):
            self.seen.append(self.first.weight.dtype)
            return self.second(checkpoint(self.again, x, use_reentrant=reentrant))

        def again(self, x):
            self.seen.append(self.first.weight.dtype)
            return self.encode(x)

    grads = []
    for kind in (Net, Checkpointed):
        model, optimizer = start(kind(), loss_scale=1.0)
        out = model(inputs().requires_grad_())
        optimizer.step()  # the recompute is of the weights that the forward had
        with ampatch.scale_loss(out.square().sum(), optimizer) as scaled:
            scaled.backward()
        assert is_float(model) and set(model.seen) <= {HALF}
        grads.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_gradients_arrive_while_earlier_layers_are_computed():
    """A node made before the forward would run last, and all half gradients would wait for it."""
    there = []

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(80))  # several buckets

        def forward(self, x):
            for number, layer in enumerate(self.layers):
                x = layer(x)
                if number == 1:
                    x.register_hook(lambda grad: there.extend(p.grad for p in self.parameters()))
            return x

    model, _ = start(Deep())
    model(inputs()).sum().backward()
    assert [grad is not None for grad in there[-32:]] == [True] * 32
    assert [grad is not None for grad in there[:4]] == [False] * 4


def test_a_weight_that_is_not_used_gets_no_gradient():
    model, optimizer = start()
    model.unused = nn.Linear(2, 2)
    with ampatch.scale_loss(model(inputs()).sum(), optimizer) as scaled:
        scaled.backward()
    assert model.unused.weight.grad is None and model.first.weight.grad is not None


def test_weights_of_an_rnn_and_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.rnn, self.head = nn.LSTM(4, 4, 2), nn.Linear(4, 4, bias=False)
            self.head.weight = self.rnn.weight_hh_l0 = nn.Parameter(torch.randn(16, 4) / 4)

        def forward(self, x):
            assert self.head.weight is self.rnn.weight_hh_l0
            return self.head(self.rnn(x)[0])

    model, _ = start(Tied())
    flat = list(model.rnn._flat_weights)
    model(torch.randn(2, 3, 4)).sum().backward()
    assert all(a is b for a, b in zip(flat, model.rnn._flat_weights, strict=True))
    assert is_float(model) and all(p.grad is not None for p in model.parameters())


def test_replicas_have_tables_of_their_own():
    model, _ = start()
    replica = model._replicate_for_data_parallel()
    for name, part in model.named_children():
        child = part._replicate_for_data_parallel()
        for key, parameter in part._parameters.items():
            setattr(child, key, parameter * 1.0)
        replica._modules[name] = child
    assert torch.equal(replica(inputs()), model(inputs())) and is_float(model)
    assert isinstance(DataParallel(model)(inputs()), torch.Tensor)


@pytest.mark.parametrize("how", ["the model", "a step"])
def test_compiled_as_a_whole(how):
    found, initial = [], nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).state_dict()
    compiled_by = torch.compile(backend="aot_eager", fullgraph=True)
    for compiled in (False, True):
        torch._dynamo.reset()
        model, optimizer = start(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
        model.load_state_dict(initial)
        forward = compiled_by(model) if how == "the model" and compiled else model

        def step(x, forward=forward):
            return forward(x).square().mean()

        if how == "a step" and compiled:
            step = compiled_by(step)
        for _ in range(3):
            optimizer.zero_grad()
            with ampatch.scale_loss(step(inputs()), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        assert is_float(model)
        found.append([p.detach().clone() for p in model.parameters()])
        ampatch.deactivate()
    for eager, fused in zip(*found, strict=True):
        torch.testing.assert_close(eager, fused, rtol=2e-2, atol=2e-3)
