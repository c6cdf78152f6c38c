"""Ctrl-C at every line of what begins and ends calls: nothing of a call stays in force.

Meanwhile another thread waits for its turn with the same model.
"""

from __future__ import annotations

import copy
import threading

import pytest
import strikes
import torch
import torch.nn.functional as F
from small_training import data
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampatch
from ampatch.casting.calls import FOLLOW, here

HALF = torch.bfloat16
FILES = (
    "casting/calls.py",
    "casting/cast_state.py",
    "casting/contexts.py",
    "models/lent_weights.py",
    "models/managed_model.py",
    "models/module_overrides.py",
    "models/submodule_calls.py",
)
MOMENTS = [15, pytest.param(10**6, marks=pytest.mark.slow, id="all")]  # at most so many, evenly
STATE = ampatch.session.session.registry.state


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
    """`during` runs in the middle of the forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        self.during = lambda: None
        self.way = "plain"

    def encode(self, x):
        return torch.tanh(self.norm(self.first(x)))

    def forward(self, x):
        if self.way == "itself":
            self.way = "plain"
            self(x)
        if self.way == "checkpoint":
            hidden = checkpoint(self.encode, x, use_reentrant=False)
        elif self.way == "function":
            hidden = CallsAgain.apply(self.first, x)
        else:
            hidden = self.encode(x)
        self.during()
        return self.second(hidden)


def start(level, scope):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ampatch.initialize(
        *(model, optimizer),
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
        out = model(data()[0])
    finally:
        model.way = "plain"
    return out


def whole_step(model, optimizer, way="plain"):
    loss = forward(model, optimizer, way).float().sum()
    with ampatch.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def in_blocks(model, optimizer):
    with ampatch.disable_casts(), torch.autocast("cpu", HALF):
        model(data()[0])


PHASES = {
    "step": whole_step,
    "recompute": lambda *given: whole_step(*given, "checkpoint"),
    "backward": lambda *given: whole_step(*given, "function"),
    "itself": lambda *given: forward(*given, "itself"),
    "part": lambda model, _: model.first(data()[0]),
    "blocks": in_blocks,
}


def values(model):
    """What a forward and a part give, in this thread: the values and gradients."""
    model.zero_grad()
    x = data(5)[0]
    out = model(x)
    out.float().square().sum().backward()
    found = [out.detach(), model.first(x).detach()]
    found += [parameter.grad.clone() for parameter in model.parameters()]
    found += [value.clone() for value in model.state_dict().values()]
    model.zero_grad()
    return found


class Waiting:
    """A thread that calls the model while its forward runs here."""

    def __init__(self, model):
        self._model, self.found, self._thread = model, None, None
        model.during = self._begin

    def _begin(self):
        if self._thread is not None or threading.current_thread() is not threading.main_thread():
            return
        self._model.way = "plain"
        self._thread = threading.Thread(target=self._call, daemon=True)
        self._thread.start()
        while not (self._model_waits() or not self._thread.is_alive()):
            pass

    def _model_waits(self):
        managed = ampatch.session.session.registry.models()[0]
        return managed.lent is not None and managed.lent.waiting > 0

    def _call(self):
        with torch.no_grad():
            self.found = self._model(data(5)[0])

    def result(self):
        """None where the strike came before the thread began."""
        self._model.during = lambda: None
        if self._thread is None:
            return None
        self._thread.join(5)
        return "it waits for ever" if self._thread.is_alive() else self.found


def wrong(model, level, expected, waiting, outside):
    """What is not as without the strike."""
    found = waiting.result()
    if found is not None and not (isinstance(found, torch.Tensor) and found.equal(expected[0])):
        return f"the other thread: {found}"
    try:
        now = values(model)
    except Exception as error:
        return repr(error)[:200]
    if here.stack or here.policy is not FOLLOW or here.copies is not None:
        return "a call is left"
    dtype = F.linear(torch.ones(1, 4), torch.ones(2, 4)).dtype
    if dtype is not outside:
        return f"outside of models {dtype}"
    if torch.is_autocast_enabled("cpu") is not (dtype is HALF):
        return "torch.autocast is on"
    kept = HALF if level == "O3" else torch.float32
    if not all(type(one) is nn.Parameter for one in model.first._parameters.values()):
        return "copies are left"
    if model.first.weight.dtype is not kept:
        return f"weights in {model.first.weight.dtype}"
    return [i for i, (a, b) in enumerate(zip(now, expected, strict=True)) if not torch.equal(a, b)]


@pytest.fixture(autouse=True)
def nothing_is_left_for_other_tests():
    yield
    ampatch.deactivate()
    STATE.reasons, STATE.per_thread = 0, False
    here.__init__()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "level, scope", [("O1", "model"), ("O1", "process"), ("O2", ""), ("O3", "")]
)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("most", MOMENTS)
def test_ctrl_c_at_a_line(phase, level, scope, most):
    model, optimizer = start(level, scope)
    expected = copy.deepcopy(values(model))
    outside = F.linear(torch.ones(1, 4), torch.ones(2, 4)).dtype

    def does():
        PHASES[phase](model, optimizer)

    does()
    model.zero_grad()
    count, _ = strikes.lines(does, FILES)
    model.zero_grad()
    bad = []
    for number in range(1, count + 1, 1 + count // most):
        waiting = Waiting(model)
        _, where = strikes.lines(does, FILES, number)
        if where.startswith("contexts.py") and phase == "blocks":
            here.__init__()  # the block's `__exit__` has not begun
        if said := wrong(model, level, expected, waiting, outside):
            bad.append(f"{number} {where}: {said}")
            ampatch.deactivate()
            here.__init__()
            STATE.reasons, STATE.per_thread = 0, False
            model, optimizer = start(level, scope)
    assert not bad, f"{phase} {level} {scope}:\n" + "\n".join(bad)
