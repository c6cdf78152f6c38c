"""Forwards in several threads, of one model and of several; replicas as DataParallel has them."""

import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from small_training import Made, in_threads, same
from torch import nn

import ampatch

X = torch.randn(4, 4)
H, FP32 = torch.bfloat16, torch.float32


def net(seed=0):
    """Uses a weight twice; calls `between` in the middle."""

    def forward(self, x):
        y = self.layer(x)
        self.between()
        return torch.softmax(self.layer(y), -1), y

    torch.manual_seed(seed)
    return Made(forward, layer=nn.Linear(4, 4), between=lambda: None)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_one_model_in_several_threads(level, grad):
    """At O2 and O3: tests/models/test_ends_of_calls.py."""
    model = ampatch.initialize(net(), opt_level=level, dtype=H, verbosity=0)
    expected = model(X)

    def work():
        with torch.set_grad_enabled(grad):
            return all(same(model(X), expected) for _ in range(25))

    assert in_threads(*[work] * 4) == [True] * 4
    assert ampatch.cache_info().entries == 0


@pytest.mark.parametrize("scope", ["process", "model"])
def test_models_of_different_levels_in_several_threads(scope):
    options = {"dtype": H, "verbosity": 0, "patch_scope": scope}
    models = [
        ampatch.initialize(net(seed), opt_level=level, **options)
        for seed, level in enumerate(["O1", "O0", "O2", "O3", "O1"])
    ]
    expected = [model(X) for model in models]
    assert [out[1].dtype for out in expected] == [H, FP32, FP32, FP32, H]

    def work(model, outputs):
        return lambda: all(same(model(X), outputs) for _ in range(25))

    assert in_threads(*map(work, models, expected)) == [True] * 5


def test_a_forward_elsewhere_does_not_keep_this_thread_s_weights():
    """One model's forward is under way in a thread while another is evaluated twice here."""
    slow, model = net(), net()
    ampatch.initialize([slow, model], dtype=H, verbosity=0)
    inside, leave = threading.Event(), threading.Event()
    slow.between = lambda: (inside.set(), leave.wait(10))
    thread = threading.Thread(target=slow, args=(X,))
    thread.start()
    assert inside.wait(10)
    with torch.no_grad():
        before = model(X)[1]
        model.layer.weight.data.mul_(2)  # an EMA swap: raises no version
        model.layer.bias.data.mul_(2)
        after = model(X)[1]
    leave.set()
    thread.join()
    assert torch.equal(after, 2 * before)


def test_each_thread_has_its_own_blocks_and_regions():
    ampatch.initialize([], dtype=H, patch_scope="process", verbosity=0)

    def under(block):
        def work():
            dtypes = set()
            for _ in range(200):
                with block(), block():
                    dtypes.add(F.linear(X, X).dtype)
                with pytest.raises(KeyError), block():
                    raise KeyError
            return dtypes

        return work

    blocks = [ampatch.disable_casts, partial(ampatch.precision, "half"), nullcontext]
    blocks += [partial(torch.autocast, "cpu", enabled=False)]
    with torch.autocast("cpu", torch.float16):
        assert in_threads(*map(under, [*blocks, *blocks])) == [{FP32}, {H}, {H}, {FP32}] * 2
    assert F.linear(X, X).dtype is H


def replica_of(model: nn.Module) -> nn.Module:
    """As torch.nn.parallel.replicate makes them: plain tensors with a graph for parameters."""
    replica = model._replicate_for_data_parallel()
    replica._modules = {name: replica_of(child) for name, child in model._modules.items()}
    for name, parameter in model._parameters.items():
        setattr(replica, name, parameter.clone())
    return replica


@pytest.mark.parametrize("scope", ["process", "model"])
def test_replicas_in_threads(opt_level, scope):
    """Replicas are cast as the model is; their gradients reach its parameters."""
    model = ampatch.initialize(net(), opt_level=opt_level, dtype=H, patch_scope=scope, verbosity=0)
    expected = model(X)
    expected[1].float().sum().backward()
    grad = model.layer.weight.grad.clone()
    model.zero_grad()
    replicas = [replica_of(model) for _ in range(4)]
    outputs = in_threads(*[lambda replica=replica: replica(X) for replica in replicas])
    assert all(same(output, expected) for output in outputs)
    sum(output[1].float().sum() for output in outputs).backward()
    assert torch.equal(model.layer.weight.grad, 4 * grad)
