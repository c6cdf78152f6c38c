"""Calls that end by an exception, in threads, forks and other calls: right, or refused.

Ctrl-C: laws/test_interrupted_calls.py.  What trains: laws/situations_calls.py.
"""

import contextlib
import copy
import itertools
import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import strikes
import torch
from small_training import Made, Net, data, in_threads, managed
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampatch

H, FP32 = torch.bfloat16, torch.float32
X = torch.ones(3, 4)
LEVELS = ["O1", "O2", "O3"]
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


def start(level="O2", model=None, **options):
    model = Net() if model is None else model
    return ampatch.initialize(model, opt_level=level, dtype=H, verbosity=0, **options)


def nothing(model):
    """What a forward does inside unless a test has it do more."""


def is_outside():
    """No forward runs in this thread as far as casts go."""
    return (X @ X.T).dtype is FP32


# Threads


@contextlib.contextmanager
def running_in_another_thread(model, root=None):
    """Context manager: a forward of `root`, or of the model, is inside the model there."""
    inside, go_on, outputs = threading.Event(), threading.Event(), []
    model.inside = lambda model: (inside.set(), go_on.wait(20))
    thread = threading.Thread(target=lambda: outputs.append((root or model)(X)))
    thread.start()
    assert inside.wait(20)
    model.inside = nothing
    try:
        yield outputs
    finally:
        go_on.set()
        thread.join(20)


THREADS = r"Net: .*one thread at a time.*copy.deepcopy\(model\).*opt_level=\"O1\""


@pytest.mark.parametrize("level", LEVELS)
def test_a_forward_while_one_runs_in_another_thread(level):
    """Refused at once at O2 and O3, and the other one goes on; the next may come from anywhere."""
    model = start(level)
    expected = model(X)
    with running_in_another_thread(model) as outputs:
        if level == "O1":
            assert torch.equal(model(X), expected)
        else:
            begin = time.monotonic()
            with pytest.raises(ampatch.AmpatchError, match=THREADS):
                model(X)
            assert time.monotonic() - begin < 5 and is_outside()
    outputs += in_threads(lambda: model(X))
    outputs.append(model(X))
    assert all(torch.equal(output, expected) for output in outputs)
    assert model.first.weight.dtype is (H if level == "O3" else FP32)


class Checkpointed(Net):
    def forward(self, x):
        hidden = checkpoint(self.encode, x, use_reentrant=False)
        self.inside(self)
        return self.second(hidden)


MEANWHILE = {  # what is called while the model runs in another thread, and the error
    "a submodule of it": (lambda root, net, loss: net.first(X), RuntimeError, "same dtype"),
    "a neighbour": (lambda root, net, loss: root[1](X[:, :2]), ampatch.AmpatchError, "one thread"),
    "a recompute": (lambda root, net, loss: loss.backward(), ampatch.AmpatchError, "one thread"),
}


@pytest.mark.parametrize("what", MEANWHILE)
def test_what_is_called_while_a_model_runs_in_another_thread(what):
    """It is an error, for it would meet the copies of that forward, and right afterwards."""
    call, error, words = MEANWHILE[what]
    root = start("O2", nn.Sequential(Checkpointed(), nn.Linear(2, 4)))
    net, loss = root[0], root(X).sum()
    with running_in_another_thread(net, net if what == "a neighbour" else root):
        with pytest.raises(error, match=words):
            call(root, net, loss)
    call(root, net, root(X).sum())
    root(X).sum().backward()
    assert net.first.weight.grad is not None and {p.dtype for p in root.parameters()} == {FP32}


@pytest.mark.parametrize("level", LEVELS)
def test_branches_in_threads(level):
    """In the model's forward they are computed with its copies; in a submodule's: refused."""

    def forward(self, x):
        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(lambda layer: layer(x), self.layers))

    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    model = start(level, nn.Sequential(Made(forward, layers=layers), nn.Linear(4, 2)))
    branches, last = (copy.deepcopy(module).to(H) for module in model)
    expected = last(sum(layer(X.to(H)) for layer in branches.layers)).float()
    for _ in range(2):
        torch.testing.assert_close(model(X).float(), expected, rtol=0.02, atol=0.02)
        if level == "O2":
            with pytest.raises(ampatch.AmpatchError, match="within a forward of the whole model"):
                model[0](X)
        assert is_outside()


def test_threads_may_call_a_model_whose_layers_another_call_has_in():
    """It swaps in no copies then, and is free again all the same."""
    body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    other = nn.Sequential(*body)
    model = Made(lambda self, x: other(x), body=body)
    start("O2", [model, other])
    expected = model(X)
    (outputs,) = in_threads(lambda: [other(X) for _ in range(2)])
    assert all(torch.equal(output, expected) for output in outputs)


def test_ctrl_c_at_any_line_that_swaps_in_or_out():
    model = start()
    expected, files = model(X), ("models/half_copy_swaps.py", "models/half_copy_slots.py")
    count, _ = strikes.lines(lambda: model(X), files)
    for number in range(1, count + 1):
        _, where = strikes.lines(lambda: model(X), files, number)
        assert {param.dtype for param in model.parameters()} == {FP32}, where
        (output,) = in_threads(lambda: model(X))
        assert torch.equal(output, expected), where
    assert count > 20


# Forks


def exit_code(child):
    """0 where the child has ended well; it has 20 seconds."""
    begin = time.monotonic()
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        time.sleep(0.005)
        if time.monotonic() > begin + 20:
            os.kill(child, signal.SIGKILL)
    return ended[1]


def end_child(model, expected):
    with contextlib.suppress(BaseException):
        is_float = model.first.weight.dtype is FP32
        os._exit(0 if is_float and torch.equal(model(X), expected) else 2)
    os._exit(1)


@needs_fork
@pytest.mark.parametrize("whose", ["another thread", "this thread"])
def test_a_child_that_is_forked_while_a_forward_runs(whose):
    """In this thread the child ends the forward, too."""
    model = start()
    expected, children = model(X).detach(), []

    def fork(model):
        model.inside = nothing
        children.append(os.fork())

    if whose == "this thread":
        model.inside = fork
        model(X)
    else:
        with running_in_another_thread(model):
            fork(model)
            if not children[0]:
                end_child(model, expected)
    if not children[0]:
        end_child(model, expected)
    assert exit_code(children[0]) == 0 and torch.equal(model(X), expected)


@needs_fork
def test_children_that_are_forked_at_any_moment_of_forwards_in_another_thread():
    model, goes_on = start(), True
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
                end_child(model, expected)
            assert exit_code(child) == 0
    finally:
        goes_on = False
        thread.join(10)


# Calls within calls


def calls_itself(error=None):
    """The innermost of its calls may raise, which the outer ones survive."""

    def forward(self, x, depth=2):
        if depth == 0 and self.error is not None:
            raise self.error
        if depth:
            with contextlib.suppress(KeyboardInterrupt, ValueError):
                x = self(x, depth - 1)
        return self.layer(x)

    return Made(forward, layer=nn.Linear(4, 4), error=error)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_model_that_calls_itself_and_is_interrupted_inside(level, error):
    model = start(level, calls_itself(error()))
    output = model(X)
    with ampatch.disable_casts():
        weight, bias = model.layer.weight.to(H), model.layer.bias.to(H)
        expected = (X.to(H) @ weight.T + bias) @ weight.T + bias
    assert torch.allclose(output.float(), expected.float(), atol=0.02) and is_outside()
    assert model.layer.weight.dtype is (H if level == "O3" else FP32)
    model.error = None
    model(X).float().sum().backward()
    assert model.layer.weight.grad.dtype is model.layer.weight.dtype


@pytest.mark.parametrize("level", LEVELS)
def test_a_hook_that_raises_comes_after_its_own_call(level):
    """And within that of the model's forward which has called the module."""
    model, seen = calls_itself(), []

    def hook(module, args, output):
        seen.append((len(args), module.layer.weight.dtype))
        if len(args) > 1 and args[1] == 1:
            raise ValueError

    model.register_forward_hook(hook)
    start(level, model)
    model(X)
    within = FP32 if level == "O1" else H
    assert seen == [(2, within), (2, within), (1, H if level == "O3" else FP32)] and is_outside()


@pytest.mark.parametrize("apart", [False, True], ids=["one session", "two"])
def test_disable_casts_reaches_a_model_that_another_one_calls(apart):
    inner = Net()
    outer = Made(lambda self, x: inner(self.layer(x)), layer=nn.Linear(4, 4))
    for models in ([inner], [outer]) if apart else ([outer, inner],):
        start("O1", models)
    with ampatch.disable_casts():
        assert outer(X).dtype is FP32
    assert outer(X).dtype is H and is_outside()


@pytest.mark.parametrize("level, inner", [("O1", "O0"), *itertools.product(LEVELS, LEVELS)])
def test_a_teacher_of_another_level_and_half_dtype(level, inner):
    """In its student's forward it computes as by itself; what it gives fits there."""
    teacher, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), data()[0].to(H).float()

    def forward(self, x):
        taught = teacher(x)
        return self.head(self.body(x) + taught), taught

    student = Made(forward, body=nn.Linear(4, 4), head=nn.Linear(4, 2))
    expected = student(x)[0]
    start(level, student)
    ampatch.initialize(teacher, opt_level=inner, dtype=torch.float16, verbosity=0)
    output, taught = student(x)
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.05)
    alone, rounding = teacher(x), 0 if level == "O1" else 0.01
    torch.testing.assert_close(taught.float(), alone.float(), rtol=rounding, atol=rounding)
    assert output.dtype is (H if level == "O1" else FP32)
    assert alone.dtype is (torch.float16 if inner == "O1" else FP32)


def test_a_submodule_that_is_managed_in_another_half_type_computes_as_its_root():
    inner = start("O2", nn.Sequential(nn.Linear(4, 4)))
    outer = nn.Sequential(inner, nn.Linear(4, 2))
    ampatch.initialize(outer, opt_level="O2", dtype=torch.float16, verbosity=0)
    seen = []
    inner[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    assert outer(X).dtype is inner(X).dtype is FP32 and seen == [torch.float16, H]


def test_a_forward_within_another_ones_keeps_no_copies():
    """Not those that the outer one has in the places of a module which both have."""
    shared, copies = nn.Linear(4, 4), []
    inner = nn.Sequential(shared, nn.Linear(4, 4))
    outer = Made(lambda self, x: inner(self.layer(x)), layer=shared)
    start("O2", inner), start("O2", outer)
    shared.register_forward_hook(lambda *call: copies.append(weakref.ref(shared.weight)))
    outer(X)
    assert len(copies) == 2 and all(copy() in (None, shared.weight) for copy in copies)


@pytest.mark.parametrize("level", LEVELS)
def test_a_block_that_is_left_within_a_forward_does_not_end_that(level):
    def suspended():
        with ampatch.disable_casts():
            yield
        yield

    model, block, seen = start(level), suspended(), []
    next(block)

    def inside(model):
        next(block)
        seen.append((model.second.weight.dtype, model.second(torch.ones(1, 8, dtype=H)).dtype))

    model.inside = inside
    assert model(X).isfinite().all()
    assert seen == [(FP32 if level == "O1" else H, H)] and is_outside()
    model.inside = nothing
    assert model(X).dtype is (H if level == "O1" else FP32)


@pytest.mark.parametrize("level", LEVELS)
def test_a_session_that_ends_within_a_forward(level):
    model = start(level, overrides={"second": "float"})
    model.inside = lambda model: ampatch.deactivate()
    with contextlib.suppress(RuntimeError):  # half activations meet FP32 weights
        model(X)
    model.inside = nothing
    assert is_outside() and model(X).dtype is FP32


# Backward passes within calls


def test_a_backward_pass_within_a_forward_in_another_thread_has_the_forwards_copies():
    """Gradients of the inputs, as for forces, through a checkpoint: its recompute is there."""
    seen = []

    def encode(layer, x):
        seen.append(layer.weight.dtype)
        return layer(x.to(layer.weight.dtype))

    def forward(self, x):
        x = x.detach().float().requires_grad_()
        energy = checkpoint(encode, self.layer, x, use_reentrant=False).sum()
        (error,) = in_threads(lambda: forces.extend(torch.autograd.grad(energy, x)))
        assert error is None, error
        return self.layer(forces.pop().to(self.layer.weight.dtype))

    forces = []
    model, _ = managed(Made(forward, layer=nn.Linear(4, 4)), "O2")
    assert model(X).dtype is FP32 and seen == [H, H] and model.layer.weight.dtype is FP32
