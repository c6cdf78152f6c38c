"""Activation checkpoints by callers that held torch's function before a session opened."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampatch
from ampatch.casting import context_propagation
from ampatch.session.registry import registry
from ampatch.torch_private import checkpoints


class Part(nn.Module):
    """An FP32 buffer meets half tensors, and one weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("place", torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.gelu(self.layer(x + self.place))
        return inner + self.layer(inner)


class Net(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.part = nn.Linear(8, 8), Part()
        self._held = functools.partial(checkpoint, use_reentrant=reentrant)
        self._is_checkpointed = reentrant is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self._held(self.part, x) if self._is_checkpointed else self.part(x)


def grads(reentrant: bool | None, level: str) -> list[torch.Tensor]:
    model = Net(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level=level, dtype=torch.bfloat16, verbosity=0)
    loss = model(torch.linspace(-1, 1, 32).view(4, 8)).float().square().mean()
    errors = []

    def backward() -> None:
        try:
            with ampatch.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=backward)  # as autograd has one for each GPU
    thread.start()
    thread.join()
    assert not errors, errors
    found = [parameter.grad.clone() for parameter in model.parameters()]
    ampatch.deactivate()
    return found


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
def test_the_recompute_casts_as_the_forward(reentrant, level):
    assert all(map(torch.equal, grads(reentrant, level), grads(None, level)))


def test_what_checkpoint_itself_calls_is_replaced(monkeypatch):
    """torch 2.14 keeps the earlier name for other callers; a later one may have yet another."""
    assert checkpoints.no_reentry() is not None
    owner = torch.utils.checkpoint
    for name, value in list(vars(owner).items()):
        code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
        if code is not None and checkpoints.no_reentry() in code.co_names:
            monkeypatch.setattr(owner, name, lambda: owner._under_a_new_name())
    assert checkpoints.no_reentry() is None


@pytest.mark.parametrize("is_keyword", [False, True], ids=["until 2.13", "since 2.14"])
def test_the_users_contexts_are_found_wherever_torch_hands_them_over(is_keyword):
    """The policy goes around the recompute's own; all other arguments are passed on as they are."""
    seen, entered = [], []

    def placed(fn, preserve_rng_state=True, context_fn=None, debug=False, *args, **kwargs):
        seen.append((context_fn, [preserve_rng_state, debug, args, kwargs]))
        yield

    def named(fn, args, kwargs, *, preserve_rng_state=True, context_fn=None, debug=False):
        seen.append((context_fn, [preserve_rng_state, debug, args, kwargs]))
        yield

    @contextlib.contextmanager
    def recompute():
        entered.append(1)
        yield

    def contexts():
        return "the forward's", recompute()

    replaced = context_propagation._without_reentry(named if is_keyword else placed, registry.state)
    if is_keyword:
        options = {"preserve_rng_state": False, "context_fn": contexts, "debug": True}
        list(replaced(len, ("x",), {"y": 1}, **options))
    else:
        list(replaced(len, False, contexts, True, "x", y=1))
    [(context_fn, others)] = seen
    assert others == [False, True, ("x",), {"y": 1}]
    forward, around = context_fn()
    assert forward == "the forward's" and not entered
    with around:
        assert entered == [1]
    assert isinstance(around, context_propagation._Recompute)


def test_a_held_checkpoint_stays_in_one_graph():
    model = Net(False)
    ampatch.initialize(model, opt_level="O1", dtype=torch.bfloat16, verbosity=0)
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
    assert compiled(torch.ones(4, 8)).dtype is torch.bfloat16
