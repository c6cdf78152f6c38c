"""Ctrl-C at every line of what begins and ends calls: right after it nothing of a call is left.

The exception has left the outermost call, and no other one has come by.  One moment is left out: a
`with` block of the script's or of torch.autocast whose `__exit__` is struck at its start has not
ended, as with torch's own.
"""

import contextlib
import copy
import itertools

import pytest
import strikes
import torch
from engine import STATE, nothing_runs, thread_calls
from small_training import data, pass_back
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampatch
from ampatch.torch_private import autocast as torch_autocast

HALF = torch.bfloat16
FILES = (
    "casting/autocast_interop.py",
    "casting/calls.py",
    "casting/context_propagation.py",
    "casting/policy.py",
    "models/half_copy_swaps.py",
    "models/managed_model.py",
    "models/module_overrides.py",
    "models/own_frame.py",
    "models/submodule_calls.py",
)
WITH_BLOCKS = ("autocast_interop.py", "policy.py")
MOMENTS = [15, pytest.param(10**6, marks=pytest.mark.slow, id="all")]  # at most so many, evenly


class CallsAgain(torch.autograd.Function):
    """Calls a module in its backward, as reversible networks do."""

    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = ctx.module(x.detach().requires_grad_())
            again.sum().backward()
        return None, grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        self.way = "plain"

    def encode(self, x):
        return torch.tanh(self.norm(self.first(x)))

    def forward(self, x):
        if self.way == "itself":
            self.way = "plain"
            self(x)
        if self.way in ("checkpoint", "reentrant"):
            hidden = checkpoint(self.encode, x, use_reentrant=self.way == "reentrant")
        elif self.way == "function":
            hidden = CallsAgain.apply(self.first, x)
        else:
            hidden = self.encode(x)
        return self.second(hidden)


def start(level, scope):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.0, max_iter=1)
    ampatch.initialize(
        *(model, [optimizer, optimizer.lbfgs]),
        opt_level=level,
        dtype=HALF,
        loss_scale=1.0,
        verbosity=0,
        overrides={"norm": "float"},
        **({"patch_scope": scope} if level == "O1" else {}),
    )
    return model, optimizer


def forward(model, optimizer, way="plain"):
    model.way = way
    try:
        return model(data()[0].requires_grad_(way == "reentrant"))
    finally:
        model.way = "plain"


def whole_step(model, optimizer, way="plain"):
    loss = forward(model, optimizer, way).float().sum()
    pass_back(loss, optimizer)
    optimizer.step()


def in_blocks(model, optimizer):
    with ampatch.disable_casts(), torch.autocast("cpu", HALF):
        model(data()[0])


def with_closure(model, optimizer):
    """An optimizer that calls it within its step."""

    def closure():
        lbfgs.zero_grad()
        loss = forward(model, lbfgs).float().square().sum()
        pass_back(loss, lbfgs)
        return loss

    lbfgs = optimizer.lbfgs
    lbfgs.step(closure)


PHASES = {
    "step": whole_step,
    "recompute": lambda *args: whole_step(*args, "checkpoint"),
    "reentrant": lambda *args: whole_step(*args, "reentrant"),
    "backward": lambda *args: whole_step(*args, "function"),
    "closure": with_closure,
    "itself": lambda *args: forward(*args, "itself"),
    "submodule": lambda model, _: model.first(data()[0]),
    "direct": lambda model, _: model.forward(data()[0]),
    "blocks": in_blocks,
}


def values(model):
    """What a forward and a part give, in this thread: the values and gradients."""
    model.zero_grad()
    x = data(5)[0]
    out = model(x)
    out.float().square().sum().backward()
    results = [out.detach(), model.first(x).detach()]
    results += [parameter.grad.clone() for parameter in model.parameters()]
    results += [value.clone() for value in model.state_dict().values()]
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
        if ("forward" in vars(part)) is not (part in FRAMED[level](model)):
            return "a frame"
    return ""


FRAMED = {
    "O1": lambda model: {model, model.norm},
    "O2": lambda model: set(model.modules()),
    "O3": lambda model: set(model.modules()),
}


def wrong(model, level, expected):
    """What is not as without the strike."""
    if said := left(model, level):
        return said
    try:
        now = values(model)
    except Exception as error:
        return repr(error)[:200]
    return [i for i, (a, b) in enumerate(zip(now, expected, strict=True)) if not torch.equal(a, b)]


def not_begun(where):
    """Whether the `__exit__` of a block or a region had not begun."""
    return where.startswith(WITH_BLOCKS) and where.endswith("(call)")


@pytest.fixture(autouse=True)
def nothing_is_left_for_other_tests():
    yield
    ampatch.deactivate()
    thread_calls.__init__()
    torch.autocast_increment_nesting()
    while torch.autocast_decrement_nesting() > 0:  # regions whose exits were struck
        pass
    torch.clear_autocast_cache()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "level, scope", [("O1", "model"), ("O1", "process"), ("O2", ""), ("O3", "")]
)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("most", MOMENTS)
def test_ctrl_c_at_a_line(phase, level, scope, most):
    model, optimizer = start(level, scope)
    expected = copy.deepcopy(values(model))

    def does():
        PHASES[phase](model, optimizer)

    does()
    model.zero_grad()
    assert not left(model, level)
    count, _ = strikes.lines(does, FILES)
    model.zero_grad()
    bad = []
    for number in range(1, count + 1, 1 + count // most):
        _, where = strikes.lines(does, FILES, number)
        if not_begun(where):
            for call in list(thread_calls.stack):
                STATE.exit(call)
            torch_autocast.set_torch_autocast_enabled("cpu", False)
        if said := wrong(model, level, expected):
            bad.append(f"{number} {where}: {said}")
            for call in list(thread_calls.stack):
                STATE.exit(call)
            ampatch.deactivate()
            model, optimizer = start(level, scope)
    assert not bad, f"{phase} {level} {scope}:\n" + "\n".join(bad)


@pytest.mark.parametrize(
    "level, scope", [("O1", "model"), ("O1", "process"), ("O2", ""), ("O3", "")]
)
def test_ctrl_c_in_the_models_own_code(level, scope):
    """In each call of a layer of it, recomputes too; torch runs no hooks then."""
    model, optimizer = start(level, scope)
    expected, seen = copy.deepcopy(values(model)), []

    def strike(module, args):
        seen.append(module)
        if len(seen) == number:
            raise KeyboardInterrupt

    for phase, does in PHASES.items():
        for number in itertools.count(1):
            seen.clear()
            handle = model.first.register_forward_pre_hook(strike)
            with contextlib.suppress(KeyboardInterrupt):
                does(model, optimizer)
            handle.remove()
            assert not wrong(model, level, expected), (phase, number)
            if len(seen) < number:
                break
        assert number > 1, phase
