"""Calls that end by an exception, in threads, forks and other calls: right, or refused."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import ampatch
from ampatch.casting.calls import here
from ampatch.models.lent_places import Tree

H, FP32 = torch.bfloat16, torch.float32
X = torch.ones(3, 4)


class Net(nn.Module):
    """`during` runs between its two layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.during = lambda x: None

    def forward(self, x):
        x = self.first(x)
        self.during(x)
        return self.second(x)


def managed(model, level="O2", **options):
    return ampatch.initialize(model, opt_level=level, dtype=H, verbosity=0, **options)


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def leave(x):
    raise SystemExit


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_thread_that_ends_in_a_forward_leaves_nothing(level):
    model = managed(Net(), level)
    expected = model(X)
    model.during = leave
    in_thread(lambda: model(X))
    model.during = lambda x: None
    assert {one.dtype for one in (model.first.weight, model.second.weight)} == {FP32}
    assert all(type(one) is nn.Parameter for one in model.first._parameters.values())
    assert torch.equal(model(X), expected) and torch.equal(model.first(X), model.first(X))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("whose", ["another thread", "this thread"])
def test_a_child_that_is_forked_while_a_forward_runs(whose):
    model = managed(Net())
    expected = model(X).detach()
    status = []

    def fork(x=None):
        model.during = lambda x: None
        child = os.fork()
        if child:
            status.append(os.waitpid(child, 0)[1])
            return
        right = 1
        with contextlib.suppress(BaseException):
            if whose == "this thread":
                here.stack[0].lending.end()
            is_float = model.first.weight.dtype is FP32
            right = 0 if is_float and torch.equal(model(X), expected) else 2
        os._exit(right)

    if whose == "this thread":
        model.during = fork
        model(X)
    else:
        begun, done = threading.Event(), threading.Event()

        def wait(x):
            begun.set()
            done.wait(10)

        model.during = wait
        thread = threading.Thread(target=lambda: model(X))
        thread.start()
        begun.wait(10)
        fork()
        done.set()
        thread.join(10)
    assert status == [0]
    assert torch.equal(model(X), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_children_that_are_forked_at_any_moment_of_forwards_in_another_thread():
    model, goes_on = managed(Net()), True
    expected = model(X).detach()

    def forwards():
        while goes_on:
            model(X)

    thread = threading.Thread(target=forwards)
    thread.start()
    try:
        for _ in range(15):
            child = os.fork()
            if not child:
                with contextlib.suppress(BaseException):
                    os._exit(0 if torch.equal(model(X), expected) else 2)
                os._exit(1)
            begin = time.monotonic()
            while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
                time.sleep(0.005)
                if time.monotonic() > begin + 20:
                    os.kill(child, signal.SIGKILL)
            assert ended[1] == 0
    finally:
        goes_on = False
        thread.join(10)


class Branches(nn.Module):
    """Computes its parts in threads."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(lambda part: part(x), self.parts))


THREADS = r"Net: .*one thread at a time.*copy.deepcopy\(model\).*opt_level=\"O1\""


@contextlib.contextmanager
def running_in_another_thread(model):
    """Context manager: a forward of the model is under way there."""
    inside, go_on, found = threading.Event(), threading.Event(), []
    model.during = lambda x: (inside.set(), go_on.wait(20))
    thread = threading.Thread(target=lambda: found.append(model(X)))
    thread.start()
    assert inside.wait(20)
    model.during = lambda x: None
    try:
        yield found
    finally:
        go_on.set()
        thread.join(20)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_forward_while_one_runs_in_another_thread(level):
    """Refused at once at O2 and O3, and the other one goes on; the next may come from anywhere."""
    model = managed(Net(), level)
    expected = model(X)
    with running_in_another_thread(model) as found:
        if level == "O1":
            assert torch.equal(model(X), expected)
        else:
            begin = time.monotonic()
            with pytest.raises(ampatch.AmpatchError, match=THREADS):
                model(X)
            assert time.monotonic() - begin < 5 and not here.stack
    assert torch.equal(found[0], expected)
    in_thread(lambda: found.append(model(X)))
    assert torch.equal(found[1], expected) and torch.equal(model(X), expected)
    assert model.first.weight.dtype is (H if level == "O3" else FP32)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_submodule_while_another_one_runs_in_another_thread(level):
    model = managed(nn.Sequential(Net(), nn.Linear(2, 4)), level)
    with running_in_another_thread(model[0]):
        with pytest.raises(ampatch.AmpatchError, match="one thread"):
            model[1](X[:, :2])
    assert model[1](X[:, :2]).isfinite().all() and model(X).isfinite().all()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_branches_in_threads(level):
    """In the model's forward they are computed with its copies; in a submodule's: refused."""
    model = managed(nn.Sequential(Branches(), nn.Linear(4, 2)), level)
    expected = sum(part(X.to(H)) for part in copy.deepcopy(model[0]).to(H).parts)
    expected = copy.deepcopy(model[1]).to(H)(expected)
    torch.testing.assert_close(model(X).float(), expected.float(), rtol=0.02, atol=0.02)
    if level == "O2":
        with pytest.raises(ampatch.AmpatchError, match="within a forward of the whole model"):
            model[0](X)
    assert not here.stack
    torch.testing.assert_close(model(X).float(), expected.float(), rtol=0.02, atol=0.02)


def test_one_thread_after_the_other_may_call_the_model():
    model = managed(Net())
    expected = model(X)
    for _ in range(3):
        with ThreadPoolExecutor(1) as pool:
            assert torch.equal(pool.submit(model, X).result(), expected)
            pool.submit(lambda: model(X).sum().backward()).result()
    assert model.first.weight.grad is not None


class CallsItself(nn.Module):
    """Its inner call may be interrupted, which the outer one survives."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.error = None

    def forward(self, x, depth=2):
        if depth == 0 and self.error is not None:
            raise self.error
        if depth:
            with contextlib.suppress(KeyboardInterrupt, ValueError):
                x = self(x, depth - 1)
        return self.layer(x)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_model_that_calls_itself_and_is_interrupted_inside(level, error):
    model = managed(CallsItself(), level)
    model.error = error()
    out = model(X)
    with ampatch.disable_casts():
        weight = model.layer.weight.to(H)
        expected = (X.to(H) @ weight.T + model.layer.bias.to(H)) @ weight.T
        expected = expected + model.layer.bias.to(H)
    assert torch.allclose(out.float(), expected.float(), atol=0.02) and not here.stack
    assert model.layer.weight.dtype is (H if level == "O3" else FP32)
    model.error = None
    out = model(X)
    out.float().sum().backward()
    assert model.layer.weight.grad.dtype is model.layer.weight.dtype


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = [inner]  # not a part
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner[0](self.layer(x))


@pytest.mark.parametrize("apart", [False, True], ids=["one session", "two"])
def test_disable_casts_reaches_a_model_that_another_one_calls(apart):
    inner = Net()
    outer = Around(inner)
    if apart:
        managed(inner, "O1"), managed(outer, "O1")
    else:
        managed([outer, inner], "O1")
    with ampatch.disable_casts():
        assert outer(X).dtype is FP32
    assert outer(X).dtype is H and not here.stack


def test_ctrl_c_as_the_weights_are_put_back(monkeypatch):
    model = managed(Net())
    expected = model(X)
    put = Tree.put

    def interrupted(tree, tensors, instead_of=None):
        if instead_of is not None:
            monkeypatch.undo()
            raise KeyboardInterrupt
        put(tree, tensors)

    monkeypatch.setattr(Tree, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    assert model.first.weight.dtype is FP32 and not here.stack
    found = []
    in_thread(lambda: found.append(model(X)))
    assert torch.equal(found[0], expected)


def test_a_part_that_is_managed_in_another_half_type_computes_as_its_whole():
    inner = managed(nn.Sequential(nn.Linear(4, 4)))
    outer = ampatch.initialize(
        nn.Sequential(inner, nn.Linear(4, 2)), opt_level="O2", dtype=torch.float16, verbosity=0
    )
    seen = []
    inner[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    assert outer(X).dtype is inner(X).dtype is FP32 and seen == [torch.float16, H]


def test_a_forward_within_another_ones_keeps_no_copies():
    """Not those that the outer one has in the places of a module which both have."""
    shared, copies = nn.Linear(4, 4), []
    inner, outer = nn.Sequential(shared, nn.Linear(4, 4)), Around(None)
    outer.layer = shared
    managed(inner), managed(outer)
    shared.register_forward_hook(lambda *call: copies.append(weakref.ref(shared.weight)))
    outer.inner[0] = inner
    outer(X)
    assert len(copies) == 2 and all(copy() in (None, shared.weight) for copy in copies)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_block_that_is_left_within_a_forward_does_not_end_that(level):
    def suspended():
        with ampatch.disable_casts():
            yield
        yield

    model, block = managed(Net(), level), suspended()
    next(block)
    seen = []

    def during(x):
        next(block)
        seen.append((model.second.weight.dtype, bool(here.stack)))

    model.during = during
    assert model(X).isfinite().all()
    assert seen == [(FP32 if level == "O1" else H, True)] and not here.stack
    model.during = lambda x: None
    assert model(X).dtype is (H if level == "O1" else FP32)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_hook_that_raises_comes_after_its_own_call(level):
    """And within that of the model's forward which has called the module."""
    model, seen = CallsItself(), []

    def hook(module, args, output):
        seen.append((len(args), len(here.stack)))
        if len(args) > 1 and args[1] == 1:
            raise ValueError

    model.register_forward_hook(hook)
    managed(model, level)
    model(X)
    assert seen == [(2, 2), (2, 1), (1, 0)] and not here.stack


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_session_that_ends_within_a_forward(level):
    model = managed(Net(), level, overrides={"second": "float"})
    model.during = lambda x: ampatch.deactivate()
    with contextlib.suppress(RuntimeError):  # half activations meet FP32 weights
        model(X)
    assert not here.stack and (X @ X.T).dtype is FP32
    model.during = lambda x: None
    assert model(X).dtype is FP32


class Again(torch.autograd.Function):
    """Calls its module in its backward, in a thread of its own, as devices have."""

    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        found = []
        in_thread(lambda: found.append(Again.within(ctx, grad)))
        return None, found[0]

    @staticmethod
    def within(ctx, grad):
        state = ampatch.session.session.registry.state

        def begin(call):
            state.enter(call, None)
            for copies in Again.lent:
                copies.lend_again(call)

        return state.within(begin, lambda: grad * ctx.module.weight.dtype.itemsize)


def test_a_backward_pass_within_a_forward_in_another_thread_has_the_forwards_copies():
    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            x = x.detach().float().requires_grad_()
            Again.lent = ampatch.session.session.registry.state.lent()
            [grad] = torch.autograd.grad(Again.apply(self.layer, x).sum(), x)
            return self.layer(grad.to(self.layer.weight.dtype))

    model = managed(Forces())
    assert model(X).dtype is FP32 and model.layer.weight.dtype is FP32
