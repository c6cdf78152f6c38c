"""Sessions whose models and optimizers are gone leave by themselves, and torch is as it was."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from repository import HELPERS
from session_pairs import pair
from torch import nn
from torch_snapshot import changes, snapshot
from warm_python import python

import ampatch
from ampatch.session.registry import registry

SETTINGS = {
    "dtype": torch.bfloat16,
    "loss_scale": "dynamic",
    "verbosity": 0,
    "patch_scope": "model",
}


def train(model, optimizer, factor=1.0):
    loss = model(torch.ones(3, 4)).float().sum() * factor
    with ampatch.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()


def tensors():
    gc.collect()
    return {id(one) for one in gc.get_objects() if issubclass(type(one), torch.Tensor)}


@pytest.mark.parametrize("has_optimizer, steps", [(True, 0), (True, 2), (False, 2)])
def test_a_session_whose_members_are_gone_leaves_torch_as_it_was(opt_level, has_optimizer, steps):
    """Nor does it hold a tensor.  No other call of ampatch is needed for that."""

    def experiment():
        model, optimizer = pair()
        ampatch.initialize(
            model, optimizer if has_optimizer else None, opt_level=opt_level, **SETTINGS
        )
        for _ in range(steps):
            train(model, optimizer) if has_optimizer else model(torch.ones(3, 4))

    experiment()  # torch keeps a little for good
    gc.collect()
    before, held = snapshot(), tensors()
    experiment()
    gc.collect()
    assert registry.sessions == []
    assert changes(before, snapshot()) == []
    assert tensors() <= held
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


def test_a_session_stays_as_long_as_a_model_or_an_optimizer_is_there():
    model, optimizer = pair()
    ampatch.initialize(model, optimizer, opt_level="O1", **SETTINGS)
    ampatch.initialize(*pair(), opt_level="O1", **SETTINGS)
    gc.collect()
    assert len(registry.sessions) == 1
    del model
    gc.collect()
    assert ampatch.loss_scale() == 65536.0
    del optimizer
    gc.collect()
    with pytest.raises(ampatch.AmpatchError, match="no ampatch session is open"):
        ampatch.loss_scale()


def test_a_session_that_was_opened_without_models_stays():
    handle = ampatch.init(verbose=False)
    optimizer = handle.wrap_optimizer(pair()[1])
    del optimizer
    gc.collect()
    assert len(registry.sessions) == 1
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float16


def test_casts_of_the_whole_process_do_not_end_when_the_collector_runs():
    """They last until the next `initialize`, or `deactivate`."""
    ampatch.initialize(*pair(), opt_level="O1", **{**SETTINGS, "patch_scope": "process"})
    gc.collect()
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    ampatch.initialize(*pair(), opt_level="O0", **SETTINGS)
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


def test_the_others_go_on_casting():
    """Also within the forward of one of them, where a collection may happen as well."""
    seen = []

    class Collects(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, inputs):
            seen.append(self.linear(inputs).dtype)
            gc.collect()
            seen.append(self.linear(inputs).dtype)
            return self.linear(inputs)

    model = Collects()
    ampatch.initialize(model, opt_level="O1", **SETTINGS)
    gc.disable()
    try:
        ampatch.initialize(*pair(), opt_level="O1", **SETTINGS)
        assert len(registry.sessions) == 2
        model(torch.ones(1, 4))
    finally:
        gc.enable()
    assert len(registry.sessions) == 1
    assert seen == [torch.bfloat16] * 2
    assert F.linear(torch.ones(1, 4), model.linear.weight).dtype is torch.bfloat16


def test_a_collection_while_patches_change_counts_afterwards(monkeypatch):
    installed = registry.installation.install

    def collecting(is_whole):
        installed(is_whole)
        gc.collect()

    gc.disable()
    try:
        ampatch.initialize(*pair(), opt_level="O0", **SETTINGS)
        monkeypatch.setattr(registry.installation, "install", collecting)
        model, optimizer = pair()
        ampatch.initialize(model, optimizer, opt_level="O1", **SETTINGS)
    finally:
        gc.enable()
    assert [session.properties.opt_level for session in registry.sessions] == ["O1"]
    train(model, optimizer)


def test_a_process_that_ends_says_nothing():
    done = python("-W", "error", HELPERS / "ending_sessions.py")
    assert (done.returncode, done.stderr) == (0, "")
