"""`checkpoint(..., context_fn=...)`: the user's context is the innermost setting in both passes."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampatch

CONTEXTS = {
    "another half type": lambda: torch.autocast("cpu", dtype=torch.float16),
    "regions off": lambda: torch.autocast("cpu", enabled=False),
    "disable_casts": ampatch.disable_casts,
    "precision": lambda: ampatch.precision("float"),
}


class Net(nn.Module):
    def __init__(self, context, in_checkpoint):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.context, self.in_checkpoint = context, in_checkpoint

    def forward(self, x):
        if self.in_checkpoint:
            contexts = lambda: (self.context(), self.context())  # noqa: E731
            return checkpoint(self.run, x, use_reentrant=False, context_fn=contexts)
        with self.context():
            return self.run(x)

    def run(self, x):
        return self.layers(x.float())


def gradients(context, in_checkpoint, opt_level):
    model = Net(context, in_checkpoint)
    if opt_level is not None:
        ampatch.initialize(model, opt_level=opt_level, dtype=torch.bfloat16, verbosity=0)
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=opt_level is None):
        output = model(x)
    output.float().sum().backward()
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    ampatch.deactivate()
    return found


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_recompute_computes_what_the_forward_did(name):
    plain, repeated = (gradients(CONTEXTS[name], again, "O1") for again in (False, True))
    for exact, found in zip(plain, repeated, strict=True):
        assert torch.equal(exact, found)


@pytest.mark.parametrize("name", ("another half type", "regions off"))
def test_regions_of_torch_autocast_do_what_they_do_there(name):
    beside, ours = (gradients(CONTEXTS[name], True, level) for level in (None, "O1"))
    for exact, found in zip(beside, ours, strict=True):
        assert torch.equal(exact, found)


def test_a_context_that_cannot_be_entered_leaves_no_policy_behind():
    class Broken(contextlib.nullcontext):
        def __enter__(self):
            raise ValueError("not now")

    contexts = iter((contextlib.nullcontext(), Broken()))
    model = Net(lambda: next(contexts), in_checkpoint=True)
    ampatch.initialize(model, opt_level="O1", dtype=torch.bfloat16, verbosity=0)
    loss = model(torch.ones(4, 8, requires_grad=True)).float().sum()
    with pytest.raises(ValueError, match="not now"):
        loss.backward()
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_in_a_checkpoint_is_recomputed_under_the_users_setting(reentrant):
    """Also with a disabled region between: it holds as the block does."""
    model = ampatch.initialize(nn.Linear(4, 4), opt_level="O1", dtype="bfloat16", verbosity=0)
    seen = []
    x = torch.ones(2, 4, requires_grad=True)
    with ampatch.disable_casts(), torch.autocast("cpu", enabled=False):
        run = lambda x: (y := model(x), seen.append(y.dtype))[0]  # noqa: E731
        loss = checkpoint(run, x, use_reentrant=reentrant).sum()
    loss.backward()
    assert set(seen) == {torch.float32} and x.grad.dtype is torch.float32
