"""A resumed run is the uninterrupted run, bit for bit."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch

# The default eps of 1e-8 is 0 in float16: at O3 Adam would divide by it.
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-4),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-4, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-4, fused=True),
}
ORDERS = list(itertools.permutations(["model", "optimizer", "amp"]))


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def start(level, kind, dtype, seed=0):
    model = build(seed)
    optimizer = OPTIMIZERS[kind](model.parameters())
    settings = {"loss_scale": "dynamic", "init_scale": 512.0, "growth_interval": 3}
    ampatch.initialize(model, optimizer, opt_level=level, dtype=dtype, verbosity=0, **settings)
    return model, optimizer


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(6, 4, generator=generator)
        targets = torch.randn(6, 2, generator=generator)
        loss = F.mse_loss(model(inputs).float(), targets)
        with ampatch.scale_loss(loss, optimizer) as scaled:
            (scaled * torch.inf if step == 2 else scaled).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def all_values(model, optimizer):
    found = [*model.parameters(), *model.buffers(), *ampatch.master_params(optimizer)]
    for state in optimizer.state.values():
        found += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in found]


def saved(model, optimizer):
    file = io.BytesIO()
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "amp": ampatch.state_dict(),
        },
        file,
    )
    file.seek(0)
    return file


def load(checkpoint, order, model, optimizer):
    for part in order:
        if part == "amp":
            ampatch.load_state_dict(checkpoint["amp"])
        else:
            {"model": model, "optimizer": optimizer}[part].load_state_dict(checkpoint[part])


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "-".join(part[0] for part in order))
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resume_in_any_order(opt_level, kind, order, half):
    model, optimizer = start(opt_level, kind, half)
    train(model, optimizer, range(5))
    file = saved(model, optimizer)
    amp = ampatch.state_dict()
    expected = train(model, optimizer, range(5, 11)), all_values(model, optimizer)
    amp_after = ampatch.state_dict()
    ampatch.deactivate()

    model, optimizer = start(opt_level, kind, half, seed=7)
    load(torch.load(file, weights_only=True), order, model, optimizer)
    assert ampatch.state_dict() == amp != {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 0}}
    losses = train(model, optimizer, range(5, 11))
    found = all_values(model, optimizer)
    assert losses == expected[0] and ampatch.state_dict() == amp_after != amp
    assert len(found) == len(expected[1]) and all(map(torch.equal, found, expected[1]))


@pytest.mark.parametrize("source", [None, "O0", "O1", "O2"])
@pytest.mark.parametrize("target", [None, "O0", "O1", "O2"])
def test_checkpoints_cross_levels(source, target):
    """FP32 values at every level but O3, so that each loads each other's exactly."""
    model = build()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    if source:
        model, optimizer = start(source, "Adam", torch.bfloat16)
        train(model, optimizer, range(3))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    ampatch.deactivate()
    other = build(9)
    if target:
        other, _ = start(target, "Adam", torch.bfloat16, seed=9)
    other.load_state_dict(state)
    found = other.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert not torch.equal(build(9).state_dict()["0.weight"], state["0.weight"])


READER = """
import sys, torch
checkpoint = torch.load(sys.argv[1], weights_only=True)
assert "ampatch" not in sys.modules
model = torch.nn.Linear(3, 2)
model.load_state_dict(checkpoint["model"])
optimizer = torch.optim.Adam(model.parameters())
optimizer.load_state_dict(checkpoint["optimizer"])
assert model.weight.dtype is torch.float32
print(model.weight.double().sum().item())
"""


def test_a_process_without_ampatch_reads_the_checkpoint(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    ampatch.initialize(model, optimizer, opt_level="O2", verbosity=0, init_scale=64.0)
    with ampatch.scale_loss(model(torch.ones(1, 3)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(saved(model, optimizer).read())
    done = subprocess.run(
        [sys.executable, "-c", READER, str(path)], capture_output=True, text=True, check=True
    )
    (master, _) = ampatch.master_params(optimizer)
    assert float(done.stdout) == master.double().sum().item()


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"loss_scaler1": {"loss_scale": 2.0, "unskipped": 0}},
        {"loss_scaler0": {"loss_scale": 0.0, "unskipped": 0}},
        {"loss_scaler0": {"loss_scale": float("nan"), "unskipped": 0}},
    ],
)
def test_a_wrong_amp_state_changes_nothing(state):
    start("O1", "SGD", torch.float16)
    before = ampatch.state_dict()
    with pytest.raises(ValueError):
        ampatch.load_state_dict(state)
    assert ampatch.state_dict() == before
