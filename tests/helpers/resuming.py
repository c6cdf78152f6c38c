"""A training run, saved half-way, for `test_resume.py`; run as a script it resumes what was saved.

python resuming.py FOLDER     # prints one line per run that did not go on bit for bit
"""

import itertools
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import ampatch
from ampatch.compat.apex.optimizers import FusedLAMB

LEVELS = ("O0", "O1", "O2", "O3")
HALF_DTYPES = (torch.float16, torch.bfloat16)
ORDERS = list(itertools.permutations(["model", "optimizer", "amp"]))
# The default eps of 1e-8 is 0 in float16: at O3 Adam would divide by it.
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "eps": 1e-4}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-4}),
    "FusedLAMB": (FusedLAMB, {"lr": 0.05}),  # counts steps in its groups
}
KERNELS = {
    **{"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}},
    "own": {},
}
# What an optimizer keeps by parameter, and whether host or device decides of a skip.
KINDS = [
    *[("SGD", "plain"), ("SGD", "fused"), ("Adam", "plain")],
    *[("AdamW", "foreach"), ("AdamW", "fused"), ("FusedLAMB", "own")],
]
SAVED_AFTER, END, OVERFLOW = 5, 10, 2  # steps


def runs():
    """Every level and half dtype with each of `KINDS`, as `(name, arguments of start)`."""
    for level, dtype, (kind, kernel) in itertools.product(LEVELS, HALF_DTYPES, KINDS):
        if (level, kind, kernel) == ("O3", "SGD", "fused"):
            continue  # torch's kernel leaves half parameters unchanged; initialize refuses it
        yield f"{level} {str(dtype)[6:]} {kind} {kernel}", (level, dtype, kind, kernel)


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def make_optimizer(model, kind="Adam", kernel="plain"):
    cls, options = OPTIMIZERS[kind]
    return cls(model.parameters(), **options, **KERNELS[kernel])


def start(level, dtype, kind, kernel="plain", seed=0):
    model = build(seed)
    optimizer = make_optimizer(model, kind, kernel)
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
            (scaled * torch.inf if step == OVERFLOW else scaled).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def checkpoint(model, optimizer):
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "amp": ampatch.state_dict(),
    }


def load(saved, order, model, optimizer):
    for part in order:
        if part == "amp":
            ampatch.load_state_dict(saved["amp"])
        else:
            {"model": model, "optimizer": optimizer}[part].load_state_dict(saved[part])


def everything(model, optimizer):
    """Weights, buffers, masters, optimizer state and loss scale, copied."""
    results = [*model.parameters(), *model.buffers(), *ampatch.master_params(optimizer)]
    for param in ampatch.master_params(optimizer):
        state = optimizer.state[param]
        results += [state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor)]
    scale = ampatch.state_dict()["loss_scaler0"]
    results += [torch.tensor(scale["loss_scale"]), torch.tensor(scale["unskipped"])]
    return [tensor.detach().clone() for tensor in results]


def save_all(folder):
    """Train every run to its end; leave a checkpoint from half-way, and what came of it."""
    for name, run in runs():
        model, optimizer = start(*run)
        train(model, optimizer, range(SAVED_AFTER))
        torch.save(checkpoint(model, optimizer), Path(folder) / f"{name}.saved")
        losses = train(model, optimizer, range(SAVED_AFTER, END))
        torch.save(losses + everything(model, optimizer), Path(folder) / f"{name}.expected")
        ampatch.deactivate()


def resume_all(folder):
    """Resume each run from its checkpoint; yields those that differ.

    Plain SGD loads in all six orders, the others in one, taken in turn.
    """
    for number, (name, run) in enumerate(runs()):
        expected = torch.load(Path(folder) / f"{name}.expected", weights_only=True)
        for order in ORDERS if "SGD plain" in name else [ORDERS[number % 6]]:
            model, optimizer = start(*run, seed=7)
            saved = torch.load(Path(folder) / f"{name}.saved", weights_only=True)
            load(saved, order, model, optimizer)
            actual = train(model, optimizer, range(SAVED_AFTER, END))
            actual += everything(model, optimizer)
            same = [a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(actual, expected)]
            if len(actual) != len(expected) or not all(same):
                yield f"{name}: {', '.join(order)}"
            ampatch.deactivate()


if __name__ == "__main__":
    for differs in resume_all(sys.argv[1]):
        print(differs)
