"""Ctrl-C at any call in ampatch's own code around models: what comes after is as without it.

A `with` block whose `__exit__` is struck at its very start has not ended, as with torch's own.
"""

import copy
import functools
import pickle

import pytest
import strikes
import torch
import torch.nn.functional as F
from engine import registry, thread_calls
from small_training import data, in_threads, step
from test_interrupted_calls import Net, forward
from torch import nn

import ampatch

HALF = torch.bfloat16
LEVELS = ["O1", "O2", "O3"]
MOMENTS = [50, pytest.param(10**6, marks=pytest.mark.slow, id="all")]  # at most so many, evenly
LINEAR = F.linear


def manage(model, optimizer, level):
    settings = {"dtype": HALF, "loss_scale": 1.0, "verbosity": 0}
    ampatch.initialize(model, optimizer, opt_level=level, **settings)
    return model, optimizer


def start(level):
    model = Net()
    return manage(model, torch.optim.SGD(model.parameters(), lr=0.1), level)


def recompute(model):
    forward(model, None, "checkpoint").float().sum().backward()


PHASES = {
    "recompute": recompute,
    "forward": lambda model: model(data()[0]),
    "evaluation": torch.no_grad()(lambda model: model(data()[0])),
    "a part": lambda model: model.first(data()[0]),
    "state_dict": lambda model: model.state_dict(),
    "load_state_dict": lambda model: model.load_state_dict(model.state_dict()),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "registration": lambda model: setattr(model, "first", model.first),
}


def look(model, optimizer, level):
    x, y = data(5)
    loss = F.mse_loss(model(x).float(), y)
    step(loss, optimizer)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), Net().parameters(), strict=True):
            parameter.copy_(value)
    results = [parameter.grad.clone() for parameter in model.parameters()]
    results += [loss.detach(), model.first(x).detach(), *model.state_dict().values()]
    results += copy.deepcopy(model).state_dict().values()
    (there,) = in_threads(lambda: model(x).detach())
    assert isinstance(there, torch.Tensor), there
    kept = torch.bfloat16 if level == "O3" else torch.float32
    assert {value.dtype for value in model.state_dict().values()} == {kept}
    assert all(
        type(value) is nn.Parameter for m in model.modules() for value in m._parameters.values()
    )
    return [*results, there]


def differ(model, optimizer, level, expected):
    """What looks different, by its place, or how looking fails."""
    try:
        actual = look(model, optimizer, level)
    except Exception as error:
        return repr(error)[:150]
    return [
        index
        for index, (a, b) in enumerate(zip(actual, expected, strict=True))
        if a.dtype is not b.dtype or not torch.equal(a, b)
    ]


def is_plain(model):
    """After `deactivate`: FP32, without hooks, and torch without casts."""
    x = data()[0]
    assert torch.equal(model(x), Net.forward(copy.deepcopy(model), x))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not any(
        getattr(module, table)
        for module in model.modules()
        for table in ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks")
    )
    assert not any(
        name in ("forward", "_ampatch_frames") for part in model.modules() for name in vars(part)
    )
    assert F.linear is LINEAR and F.linear(x, model.first.weight).dtype is torch.float32
    return True


@pytest.fixture(autouse=True)
def nothing_is_left_for_other_tests():
    """What costs time alone: a policy that was struck as it was left, an observer with no block."""
    yield
    ampatch.deactivate()
    thread_calls.__init__()
    registry.observers.__init__()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("most", MOMENTS)
def test_ctrl_c(phase, level, most):
    model, optimizer = start(level)
    expected = look(model, optimizer, level)
    assert not differ(model, optimizer, level, expected)

    def does():
        PHASES[phase](model)

    does()
    room = "models" if phase == "recompute" else ""  # what is taken along has tests of its own
    bad = []
    count = strikes.calls(does, room)
    for number in range(1, count + 1, 1 + count // most):
        where = strikes.strike(does, number, room)
        wrong = differ(model, optimizer, level, expected)
        if not wrong:
            continue
        bad.append(f"{number} {where}: {wrong}")
        ampatch.deactivate()
        model, optimizer = start(level)
    assert not bad, "\n".join(bad)
    ampatch.deactivate()
    assert is_plain(model)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("grad", [True, False])
def test_a_handler_that_calls_the_model(level, grad):
    """Of a signal, or a `__del__`, at any call of ampatch's in a forward: both are right."""
    model, _ = start(level)
    x, bad, actual = data()[0], [], []

    def both():
        actual.clear()
        with torch.set_grad_enabled(grad):
            actual.append(model(x))

    def handler():
        with torch.set_grad_enabled(grad):
            actual.append(model(x))

    both()
    (expected,) = actual
    for number in range(1, strikes.calls(both) + 1, 2):
        try:
            where = strikes.strike(both, number, action=handler)
            right = len(actual) == 2 and all(torch.equal(out, expected) for out in actual)
            wrong = "" if right else repr(actual)[:150]
        except Exception as error:
            wrong, where = repr(error)[:150], ""
        both()
        (there,) = in_threads(functools.partial(model, x))
        if wrong or not torch.equal(actual[0], expected) or not torch.equal(there, expected):
            bad.append(f"{number} {where}: {wrong}")
            ampatch.deactivate()
            model, _ = start(level)
    assert not bad, "\n".join(bad)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("phase", ["initialize", "deactivate"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("most", MOMENTS)
def test_ctrl_c_as_a_session_begins_or_ends(level, phase, most):
    """In what models do there.  After `deactivate` all is plain, and a session may begin anew."""
    expected = look(*start(level), level)
    ampatch.deactivate()
    model, optimizer, bad = None, None, []
    begin = functools.partial(manage, level=level)

    def prepare():
        nonlocal model, optimizer
        ampatch.deactivate()
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if phase == "deactivate":
            begin(model, optimizer)

    def does():
        begin(model, optimizer) if phase == "initialize" else ampatch.deactivate()

    prepare()
    count = strikes.calls(does, "models")
    for number in range(1, count + 1, 1 + count // most):
        prepare()
        where = strikes.strike(does, number, "models")
        ampatch.deactivate()
        assert is_plain(model), where
        begin(model, optimizer)
        if wrong := differ(model, optimizer, level, expected):
            bad.append(f"{number} {where}: {wrong}")
    assert not bad, "\n".join(bad)
