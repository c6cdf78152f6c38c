"""Ctrl-C at any line and call of ampatch around models: right after it nothing of a call is left.

The exception has left the outermost call, and no other one has come by.  One moment is left out: a
`with` block of the script's or of torch.autocast whose `__exit__` is struck at its start has not
ended, as with torch's own.
"""

import contextlib
import copy
import functools
import itertools
import pickle
from pathlib import Path

import pytest
import strikes
import torch
import torch.nn.functional as F
from engine import STATE, nothing_runs, registry, thread_calls
from small_training import InBackward, data, in_threads, pass_back
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampatch
from ampatch.torch_private import autocast as torch_autocast

HALF = torch.bfloat16
LINEAR = F.linear
FLOAT_NORM = {"norm": "float"}
FILES = tuple(map(str, Path(strikes.ROOT, "models").glob("*.py")))
FILES += tuple(
    f"casting/{name}.py" for name in ("autocast_interop", "calls", "context_propagation", "policy")
)
WITH_BLOCKS = ("autocast_interop.py", "policy.py")
WAYS = pytest.mark.parametrize(
    "level, scope", [("O1", "model"), ("O1", "process"), ("O2", ""), ("O3", "")]
)
MOST = pytest.mark.parametrize("most", [25, pytest.param(10**6, marks=pytest.mark.slow, id="all")])
"""At most so many moments, evenly."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        self.way = "plain"

    def encode(self, x):
        return torch.tanh(self.norm(self.first(x)))

    def again(self, x):
        self.first(x).sum().backward()

    def forward(self, x):
        if self.way == "itself":
            self.way = "plain"
            self(x)
        if self.way in ("checkpoint", "reentrant"):
            hidden = checkpoint(self.encode, x, use_reentrant=self.way == "reentrant")
        else:
            hidden = self.encode(x)
        if self.way == "function":
            hidden = InBackward.apply(hidden, torch.enable_grad()(lambda: self.again(x)))
        return self.second(hidden)


def manage(model, optimizers, level, scope, overrides=FLOAT_NORM):
    ampatch.initialize(
        *(model, optimizers),
        opt_level=level,
        dtype=HALF,
        loss_scale=1.0,
        verbosity=0,
        overrides=overrides,
        **({"patch_scope": scope} if level == "O1" else {}),
    )


def made():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return model, [optimizer, torch.optim.LBFGS(model.parameters(), lr=0.0, max_iter=1)]


def start(level, scope, overrides=FLOAT_NORM):
    model, optimizers = made()
    manage(model, optimizers, level, scope, overrides)
    return model, optimizers


def forward(model, optimizers, way="plain"):
    model.way = way
    try:
        return model(data()[0].requires_grad_(way == "reentrant"))
    finally:
        model.way = "plain"


def whole_step(model, optimizers, way="plain"):
    pass_back(forward(model, optimizers, way).float().sum(), optimizers[0])
    optimizers[0].step()


def in_blocks(model, optimizers):
    with ampatch.disable_casts(), torch.autocast("cpu", HALF):
        model(data()[0])


def with_closure(model, optimizers):
    """An optimizer that calls it within its step."""

    def closure():
        lbfgs.zero_grad()
        loss = forward(model, optimizers).float().square().sum()
        pass_back(loss, lbfgs)
        return loss

    lbfgs = optimizers[1]
    lbfgs.step(closure)


CALLS = {
    "step": whole_step,
    "recompute": lambda *args: whole_step(*args, "checkpoint"),
    "reentrant": lambda *args: whole_step(*args, "reentrant"),
    "backward": lambda *args: whole_step(*args, "function"),
    "closure": with_closure,
    "itself": lambda *args: forward(*args, "itself"),
    "evaluation": torch.no_grad()(forward),
    "submodule": lambda model, _: model.first(data()[0]),
    "direct": lambda model, _: model.forward(data()[0]),
    "blocks": in_blocks,
}
PHASES = {
    **CALLS,
    "state_dict": lambda model, _: model.state_dict(),
    "load_state_dict": lambda model, _: model.load_state_dict(model.state_dict()),
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),
    "registration": lambda model, _: setattr(model, "first", model.first),
}


def values(model):
    """What a forward, a submodule, copies and another thread give: values and gradients."""
    model.zero_grad()
    x = data(5)[0]
    out = model(x)
    out.float().square().sum().backward()
    (there,) = in_threads(lambda: model(x).detach())
    assert isinstance(there, torch.Tensor), there
    results = [out.detach(), there, model.first(x).detach()]
    results += [param.grad.clone() for param in model.parameters()]
    for state in (model.state_dict(), copy.deepcopy(model).state_dict()):
        results += [value.clone() for value in state.values()]
    model.zero_grad()
    return results


def left(model, level):
    """What is not as it was before the call, right after it."""
    if not nothing_runs():
        return "a call is left, or functions look at their thread"
    if torch_autocast.is_torch_autocast_enabled("cpu"):
        return "torch.autocast is on"
    for part in model.modules():
        if not all(type(value) is nn.Parameter for value in part._parameters.values()):
            return "half copies are left"
        dtypes = {param.dtype for param in part.parameters(recurse=False)}
        if dtypes - {HALF if level == "O3" and part is not model.norm else torch.float32}:
            return f"weights in {dtypes}"
        if ("forward" in vars(part)) is not (level != "O1" or part in (model, model.norm)):
            return "a frame"
    return ""


def wrong(model, level, expected):
    """What is not as without the strike."""
    if said := left(model, level):
        return said
    try:
        now = values(model)
    except Exception as error:
        return repr(error)[:200]
    pairs = enumerate(zip(now, expected, strict=True))
    return [i for i, (a, b) in pairs if a.dtype is not b.dtype or not torch.equal(a, b)]


def is_plain(model):
    """After `deactivate`: FP32, without hooks, and torch without casts."""
    x = data()[0]
    assert torch.equal(model(x), Net.forward(copy.deepcopy(model), x))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for part in model.modules():
        assert not vars(part).keys() & {"forward", "_ampatch_frames"}
        assert not (part._forward_hooks or part._forward_pre_hooks or part._state_dict_hooks)
    assert F.linear is LINEAR and F.linear(x, model.first.weight).dtype is torch.float32
    return True


def not_begun(where):
    """Whether the `__exit__` of a block or a region had not begun."""
    return where.startswith(WITH_BLOCKS) and where.endswith("(call)")


def leave_all():
    for call in list(thread_calls.stack):
        STATE.exit(call)


@pytest.fixture(autouse=True)
def nothing_is_left_for_other_tests():
    yield
    ampatch.deactivate()
    thread_calls.__init__()
    registry.observers.__init__()  # one with no block costs time alone
    torch.autocast_increment_nesting()
    while torch.autocast_decrement_nesting() > 0:  # regions whose exits were struck
        pass
    torch.clear_autocast_cache()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@WAYS
@pytest.mark.parametrize("phase", PHASES)
@MOST
def test_ctrl_c_at_a_line(phase, level, scope, most):
    model, optimizers = start(level, scope)
    expected = copy.deepcopy(values(model))

    def does():
        PHASES[phase](model, optimizers)

    does()
    model.zero_grad()
    assert not left(model, level)
    count, _ = strikes.lines(does, FILES, rooms=("",))
    model.zero_grad()
    bad = []
    for number in range(1, count + 1, 1 + count // most):
        _, where = strikes.lines(does, FILES, number, rooms=("",))
        if not_begun(where):
            leave_all()
            torch_autocast.set_torch_autocast_enabled("cpu", False)
        if said := wrong(model, level, expected):
            bad.append(f"{number} {where}: {said}")
            leave_all()
            ampatch.deactivate()
            model, optimizers = start(level, scope)
    assert not bad, f"{phase} {level} {scope}:\n" + "\n".join(bad)
    ampatch.deactivate()
    assert is_plain(model)


@WAYS
def test_ctrl_c_in_the_models_own_code(level, scope):
    """In each call of a layer of it, recomputes too; torch runs no hooks then."""
    model, optimizers = start(level, scope)
    expected, seen = copy.deepcopy(values(model)), []

    def strike(module, args):
        seen.append(module)
        if len(seen) == number:
            raise KeyboardInterrupt

    for phase, does in CALLS.items():
        for number in itertools.count(1):
            seen.clear()
            handle = model.first.register_forward_pre_hook(strike)
            with contextlib.suppress(KeyboardInterrupt):
                does(model, optimizers)
            handle.remove()
            assert not wrong(model, level, expected), (phase, number)
            if len(seen) < number:
                break
        assert number > 1, phase


@WAYS
@pytest.mark.parametrize("grad", [True, False])
def test_a_handler_that_calls_the_model(level, scope, grad):
    """Of a signal, or a `__del__`, in a forward: both are right."""
    model, _ = start(level, scope, None)
    x, outputs = data()[0], []

    def call():
        with torch.set_grad_enabled(grad):
            outputs.append(model(x))

    call()
    expected, (count, _) = outputs[0], strikes.lines(call, FILES, rooms=("",))
    for number in range(1, count + 1, 3):
        outputs.clear()
        _, where = strikes.lines(call, FILES, number, ("",), action=call)
        call()
        outputs += in_threads(functools.partial(model, x))
        assert len(outputs) == 4 and all(torch.equal(out, expected) for out in outputs), where


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("phase", ["initialize", "deactivate"])
@WAYS
@MOST
def test_ctrl_c_as_a_session_begins_or_ends(level, scope, phase, most):
    """In what models do there.  After `deactivate` all is plain, and a session may begin anew."""
    expected = values(start(level, scope)[0])
    ampatch.deactivate()

    def prepare():
        return made() if phase == "initialize" else start(level, scope)

    def does():
        manage(model, optimizers, level, scope) if phase == "initialize" else ampatch.deactivate()

    model, optimizers = prepare()
    count, _ = strikes.lines(does, FILES)
    for number in range(1, count + 1, 1 + count // most):
        ampatch.deactivate()
        model, optimizers = prepare()
        _, where = strikes.lines(does, FILES, number)
        ampatch.deactivate()
        assert is_plain(model), where
        manage(model, optimizers, level, scope)
        assert not wrong(model, level, expected), where
