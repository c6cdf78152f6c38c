"""Sessions whose models and optimizers are gone end at the next `initialize` or `deactivate`."""

import gc
import subprocess
import sys

import pytest
import torch
from repository import HELPERS
from session_pairs import pair
from small_training import step
from torch import nn
from torch_snapshot import changes, snapshot
from warm_python import environment

import ampatch
from ampatch.session.session import registry

SETTINGS = {
    "dtype": torch.bfloat16,
    "loss_scale": "dynamic",
    "verbosity": 0,
    "patch_scope": "model",
}


def tensors():
    """Ids of all tensors but single numbers: a loss scale stays as long as its session."""
    gc.collect()
    live = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return {id(tensor) for tensor in live if tensor.dim()}


@pytest.mark.parametrize("has_optimizer, steps", [(True, 0), (True, 2), (False, 2)])
def test_a_session_whose_members_are_gone_holds_no_weight_and_ends(opt_level, has_optimizer, steps):
    """FP32 calls are as they were; torch is so after the next call of `initialize`."""

    def experiment():
        model, optimizer = pair()
        ampatch.initialize(
            model, optimizer if has_optimizer else None, opt_level=opt_level, **SETTINGS
        )
        for _ in range(steps):
            loss = model(torch.ones(3, 4)).float().sum()
            if has_optimizer:
                step(loss, optimizer)
                optimizer.zero_grad()

    experiment()  # torch keeps a little for good
    ampatch.deactivate()
    gc.collect()
    before, held = snapshot(), tensors()
    experiment()
    gc.collect()
    assert tensors() <= held
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
    kept = nn.Linear(1, 1)
    ampatch.initialize(kept, opt_level="O0", **SETTINGS)
    assert len(registry.sessions) == 1
    ampatch.deactivate()
    assert changes(before, snapshot()) == []


def test_a_session_stays_as_long_as_a_model_or_an_optimizer_is_there():
    """One whose members are gone does not stand for "the session opened last"."""
    model, optimizer = pair()
    ampatch.initialize(model, optimizer, opt_level="O1", **SETTINGS)
    ampatch.initialize(*pair(), opt_level="O1", **{**SETTINGS, "loss_scale": 4.0})
    gc.collect()
    del model
    gc.collect()
    assert ampatch.loss_scale() == 65536.0
    del optimizer
    gc.collect()
    with pytest.raises(ampatch.AmpatchError, match="no ampatch session is open"):
        ampatch.loss_scale()


def test_a_process_that_ends_says_nothing():
    command = [sys.executable, "-W", "error", HELPERS / "ending_sessions.py"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
