"""A resumed run is the uninterrupted run, bit for bit."""

import torch
from repository import HELPERS
from resuming import save_all, start, train
from warm_python import python

import ampatch


def test_a_new_process_goes_on_bit_for_bit(tmp_path):
    """All levels and half dtypes, optimizers of each kind; loaded in any order."""
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
