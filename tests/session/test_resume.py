"""A resumed run is the uninterrupted run, bit for bit."""

from __future__ import annotations

import copy

import torch
from repository import HELPERS
from resuming import build, checkpoint, load, save_all, start, train
from warm_python import python

import ampatch
from ampatch.compat.apex.optimizers import FusedLAMB


def test_a_new_process_goes_on_bit_for_bit(tmp_path):
    """All levels and half types, optimizers of each kind; loaded in any order."""
    save_all(tmp_path)
    done = python(HELPERS / "resuming.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_the_saved_runs_have_seen_skips_and_growth():
    """Else the scale's state would not be worth loading."""
    model, optimizer = start("O2", torch.float16, "SGD")
    train(model, optimizer, range(3))
    assert ampatch.step_was_skipped(optimizer)
    train(model, optimizer, range(3, 5))
    assert ampatch.state_dict() == {"loss_scaler0": {"loss_scale": 256.0, "unskipped": 2}}


def test_an_optimizer_that_counts_in_its_groups_goes_on_counting(opt_level):
    """Its state has no steps by parameter, before and after."""

    def begin():
        model = build()
        optimizer = FusedLAMB(model.parameters(), lr=0.05)
        settings = {"opt_level": opt_level, "dtype": torch.bfloat16, "loss_scale": "dynamic"}
        return ampatch.initialize(model, optimizer, verbosity=0, **settings)

    model, optimizer = begin()
    train(model, optimizer, range(4))
    saved = copy.deepcopy(checkpoint(model, optimizer))
    losses = train(model, optimizer, range(4, 10))
    weights = [param.clone() for param in model.parameters()]
    ampatch.deactivate()
    resumed, again = begin()
    load(copy.deepcopy(saved), ("model", "optimizer", "amp"), resumed, again)
    assert [group["step"] for group in again.param_groups] == [3]  # one was skipped
    assert not any("step" in entry for entry in again.state.values())
    assert train(resumed, again, range(4, 10)) == losses
    assert all(map(torch.equal, weights, resumed.parameters()))
