"""A resumed run is the uninterrupted run, bit for bit; checkpoints go everywhere."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from repository import HELPERS
from resuming import (
    HALF_TYPES,
    LEVELS,
    build,
    checkpoint,
    load,
    make_optimizer,
    save_all,
    start,
    train,
)
from warm_python import python

import ampatch
from ampatch.compat.apex.optimizers import FusedLAMB


def in_a_new_process(*arguments):
    """What a Python process of its own prints."""
    done = python(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_new_process_goes_on_bit_for_bit(tmp_path):
    """All levels and half types, optimizers of each kind; loaded in any order."""
    save_all(tmp_path)
    assert in_a_new_process(HELPERS / "resuming.py", tmp_path).splitlines() == []


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


# From one level to another


def values_of(thing):
    return {name: value.clone() for name, value in thing.state_dict().items()}


def optimizer_values(optimizer):
    """Step counts and FP32 tensors of the optimizer's state, in the parameters' order."""
    state = optimizer.state_dict()["state"]
    return [state[index][key].clone() for index in sorted(state) for key in sorted(state[index])]


def begin(level, seed):
    if level is not None:
        return start(level, torch.bfloat16, "Adam", seed=seed)
    model = build(seed)
    return model, make_optimizer(model)


def train_plain(model, optimizer, step):
    generator = torch.Generator().manual_seed(step)
    loss = F.mse_loss(model(torch.randn(6, 4, generator=generator)).float(), torch.ones(6, 2))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize(
    "source, target", [*itertools.combinations_with_replacement([None, "O0", "O1", "O2"], 2)]
)
def test_checkpoints_cross_levels_and_come_back(source, target):
    """FP32 values at every level but O3: weights and optimizer state arrive exactly."""
    model, optimizer = begin(source, seed=0)
    for step in range(3):
        train_plain(model, optimizer, step)
    weights, state = values_of(model), optimizer_values(optimizer)
    saved = {"model": weights, "optimizer": optimizer.state_dict()}
    assert not torch.equal(build(9).state_dict()["0.weight"], weights["0.weight"])
    for seed, level in ((9, target), (8, source)):
        ampatch.deactivate()
        model, optimizer = begin(level, seed)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        found = values_of(model)
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], value) for name, value in weights.items())
        assert all(map(torch.equal, optimizer_values(optimizer), state))
        saved = {"model": found, "optimizer": optimizer.state_dict()}
    train_plain(model, optimizer, 4)
    assert not torch.equal(model.state_dict()["0.weight"], weights["0.weight"])


# Without ampatch

READER = """
import sys
sys.modules["ampatch"] = None  # import ampatch raises
import torch
for path in sys.argv[1:]:
    checkpoint = torch.load(path, weights_only=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
    )
    model.load_state_dict(checkpoint["model"])
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    print(sum(value.double().sum().item() for value in model.state_dict().values()))
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    print(all(bool(value.isfinite().all()) for value in model.parameters()))
"""


def test_a_process_without_ampatch_reads_and_trains_on(tmp_path):
    paths, expected = [], []
    for level in LEVELS:
        for dtype in HALF_TYPES:
            model, optimizer = start(level, dtype, "Adam")
            train(model, optimizer, range(4))
            paths.append(tmp_path / f"{level} {dtype}.pt")
            torch.save(checkpoint(model, optimizer), paths[-1])
            values = model.state_dict().values()
            expected += [str(sum(value.double().sum().item() for value in values)), "True"]
            ampatch.deactivate()
    assert in_a_new_process("-c", READER, *paths).split() == expected
