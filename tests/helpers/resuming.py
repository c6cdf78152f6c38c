"""A training run, saved half-way, for `test_resume.py`; run as a script it resumes what was saved.

python resuming.py FOLDER     # prints one line per run that did not go on bit for bit
"""

import copy
import itertools
import math
import sys
from functools import partial
from pathlib import Path

import small_training
import torch
from session_pairs import build
from small_training import data

import ampatch
from ampatch.compat.apex.optimizers import FusedLAMB

ORDERS = list(itertools.permutations(["model", "optimizer", "amp"]))
# The default eps of 1e-8 is 0 in float16: at O3 Adam would divide by it.
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
AdamW = partial(torch.optim.AdamW, lr=0.01, eps=1e-4)
KINDS = {
    "SGD": partial(SGD, foreach=False),
    "SGD fused": partial(SGD, fused=True),
    "Adam": partial(torch.optim.Adam, lr=0.01, eps=1e-4, foreach=False),
    "AdamW foreach": partial(AdamW, foreach=True),
    "AdamW fused": partial(AdamW, fused=True),
    "FusedLAMB": partial(FusedLAMB, lr=0.05),  # counts steps in its groups
}
"""What an optimizer keeps by parameter, and whether host or device decides of a skip."""
SAVED_AFTER, END, OVERFLOW = 5, 10, 2  # steps


def runs():
    """Every level and half dtype with each of `KINDS`: arguments of `start`."""
    levels, dtypes = ("O0", "O1", "O2", "O3"), (torch.float16, torch.bfloat16)
    for level, dtype, kind in itertools.product(levels, dtypes, KINDS):
        if (level, kind) != ("O3", "SGD fused"):  # its kernel skips half weights; it is refused
            yield level, dtype, kind


def start(level, dtype, kind, seed=0):
    model = build(seed)
    optimizer = KINDS[kind](model.parameters())
    settings = {"loss_scale": "dynamic", "init_scale": 512.0, "growth_interval": 3}
    ampatch.initialize(model, optimizer, opt_level=level, dtype=dtype, verbosity=0, **settings)
    return model, optimizer


def train(model, optimizer, steps):
    factors = [math.inf if step == OVERFLOW else 1.0 for step in steps]
    return [
        small_training.train(model, optimizer, data(step), factor)
        for step, factor in zip(steps, factors)
    ]


def checkpoint(model, optimizer):
    parts = {"model": model, "optimizer": optimizer, "amp": ampatch}
    return {name: part.state_dict() for name, part in parts.items()}


def load(saved, order, model, optimizer):
    parts = {"model": model, "optimizer": optimizer, "amp": ampatch}
    for name in order:
        parts[name].load_state_dict(saved[name])


def rest(model, optimizer):
    """The losses until the end, and then weights, buffers, masters, states and loss scale."""
    losses = train(model, optimizer, range(SAVED_AFTER, END))
    scale = ampatch.state_dict()["loss_scaler0"]
    numbers = torch.tensor([*losses, scale["loss_scale"], scale["unskipped"]])
    return [numbers, *small_training.everything(model, optimizer)]


def path_of(folder, run):
    return Path(folder, " ".join(map(str, run)))


def save_all(folder):
    """Train every run to its end; leave a checkpoint from half-way, and what came of it."""
    for run in runs():
        model, optimizer = start(*run)
        train(model, optimizer, range(SAVED_AFTER))
        saved = copy.deepcopy(checkpoint(model, optimizer))  # it aliases the weights
        torch.save([saved, rest(model, optimizer)], path_of(folder, run))
        ampatch.deactivate()


def resume_all(folder):
    """Resume each run from its checkpoint; yields those that differ.

    Plain SGD loads in all six orders, the others in one, taken in turn.
    """
    for number, run in enumerate(runs()):
        for order in ORDERS if run[-1] == "SGD" else [ORDERS[number % 6]]:
            saved, expected = torch.load(path_of(folder, run), weights_only=True)
            model, optimizer = start(*run, seed=7)
            load(saved, order, model, optimizer)
            actual = rest(model, optimizer)
            same = [a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(actual, expected)]
            if len(actual) != len(expected) or not all(same):
                yield f"{run}: {order}"
            ampatch.deactivate()


if __name__ == "__main__":
    for differs in resume_all(sys.argv[1]):
        print(differs)
