"""Forwards in several threads, replicas as DataParallel has them, and activation checkpoints.

A recompute casts as the forward did, whatever stands around it, in the thread of the backward pass.
What training with checkpoints gives is in `tests/laws/situations_graphs.py`.
"""

import contextlib
import functools
import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from small_training import Made, in_threads, same
from torch import nn
from torch.utils.checkpoint import checkpoint

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


ROWS = torch.linspace(-1, 1, 32).view(4, 8)


class Part(nn.Module):
    """An FP32 buffer meets half tensors, one weight is used twice, and dropout is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)
        self.register_buffer("place", torch.randn(8))

    def forward(self, x):
        inner = nn.functional.gelu(self.layer(x + self.place))
        return self.drop(inner + self.layer(inner))


class Net(nn.Module):
    """A layer, and parts that are run in one of several ways."""

    def __init__(self, run) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.parts = nn.Linear(8, 8), nn.Sequential(*(Part() for _ in range(3)))
        self.run = run

    def forward(self, x):
        return self.run(self.parts, self.first(x))


HELD = {
    reentrant: functools.partial(checkpoint, use_reentrant=reentrant) for reentrant in (True, False)
}
"""As libraries hold torch's function, from before a session."""


def one_by_one(reentrant, parts, x):
    for part in parts:
        x = HELD[reentrant](part, x)
    return x


def plainly(parts, x):
    return parts(x)


WAYS = {
    "reentrant": functools.partial(one_by_one, True),
    "not reentrant": functools.partial(one_by_one, False),
    "nested": lambda parts, x: HELD[False](functools.partial(one_by_one, False, parts), x),
}


def gradients(level, run, **settings):
    """Output and gradients; the backward pass is in a thread, as autograd has one for each GPU."""
    model = Net(run)
    ampatch.initialize(model, opt_level=level, **{"dtype": H, "verbosity": 0, **settings})
    x = ROWS.clone().requires_grad_()
    torch.manual_seed(2)
    output = model(x)
    assert in_threads(output.float().square().mean().backward) == [None]
    assert ampatch.cache_info().entries == 0
    ampatch.deactivate()
    return [output.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("scope", ["process", "model"])
def test_checkpoints_change_no_bit(opt_level, scope):
    expected = gradients(opt_level, plainly, patch_scope=scope)
    for name, run in WAYS.items():
        assert same(gradients(opt_level, run, patch_scope=scope), expected), name


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
def test_under_an_override_and_beside_a_model_at_another_level(way):
    rules = {"parts.1": "float"}
    expected = gradients("O1", plainly, overrides=rules)
    assert same(gradients("O1", WAYS[way], overrides=rules), expected)
    assert not same(gradients("O1", plainly), expected)
    alone = gradients("O0", WAYS[way])
    ampatch.initialize(nn.Linear(2, 2), dtype=H, verbosity=0)
    assert same(gradients("O0", WAYS[way]), alone)


def test_a_held_checkpoint_stays_in_one_graph():
    model = ampatch.initialize(Net(WAYS["not reentrant"]), opt_level="O1", dtype=H, verbosity=0)
    assert torch.compile(model.forward, backend="eager", fullgraph=True)(ROWS).dtype is H


# The user's own contexts: `checkpoint(..., context_fn=...)`

CONTEXTS = {
    "another half dtype": lambda: torch.autocast("cpu", dtype=torch.float16),
    "regions off": lambda: torch.autocast("cpu", enabled=False),
    "disable_casts": ampatch.disable_casts,
    "precision": lambda: ampatch.precision("float"),
}


def in_context(context, parts, x):
    with context():
        return torch.tanh(parts[0].layer(x.float()))


def recomputed_in(context, parts, x):
    run = functools.partial(in_context, contextlib.nullcontext, parts)
    return checkpoint(run, x, use_reentrant=False, context_fn=lambda: (context(), context()))


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_users_context_is_the_innermost_setting_in_both_passes(name):
    """As without a checkpoint; and what regions of torch do, they do under autocast alone."""
    ways = [functools.partial(way, CONTEXTS[name]) for way in (in_context, recomputed_in)]
    plain, repeated = (gradients("O1", way)[:-4] for way in ways)
    assert same(repeated, plain)
    if "region" in name or "half dtype" in name:
        model, x = Net(ways[1]), ROWS.clone().requires_grad_()
        with torch.autocast("cpu", H):
            output = model(x)
        output.float().square().mean().backward()
        tensors = [output.detach(), x.grad, *(p.grad for p in model.parameters())][:-4]
        assert same(tensors, repeated)


def test_a_context_that_cannot_be_entered_leaves_no_policy_behind():
    class Broken(contextlib.nullcontext):
        def __enter__(self):
            raise ValueError("not now")

    contexts = iter((contextlib.nullcontext(), Broken()))
    model = Net(functools.partial(recomputed_in, lambda: next(contexts)))
    ampatch.initialize(model, opt_level="O1", dtype=H, verbosity=0)
    loss = model(ROWS.clone().requires_grad_()).float().sum()
    with pytest.raises(ValueError, match="not now"):
        loss.backward()
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is FP32


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("region, dtype", [(None, H), (False, FP32), (True, H)])
def test_a_recompute_has_the_users_setting_of_its_forward(region, dtype, reentrant):
    """A region in a block, or neither: around a model, in it, and around a call beside models."""
    again, layer, seen = HELD[reentrant], nn.Linear(8, 8), []
    model = Net(lambda parts, x: again(run, parts[0].layer, x))
    ampatch.initialize([model, layer], opt_level="O1", dtype=H, patch_scope="process", verbosity=0)

    def run(call, x):
        seen.append(call(x).dtype)
        return call(x)

    with contextlib.ExitStack() as around:
        if region is not None:
            around.enter_context(ampatch.disable_casts())
            around.enter_context(torch.autocast("cpu", dtype=H, enabled=region))
        x = ROWS.clone().requires_grad_()
        outputs = [again(run, layer, x), model(x), again(run, ROWS.t().matmul, x)]
    sum(output.float().sum() for output in outputs).backward()
    assert seen == [dtype] * 6 and x.grad.dtype is FP32
