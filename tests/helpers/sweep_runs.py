"""Sweeps of small scripts, in real processes."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import ampatch
from ampatch.sweep import Sweep
from ampatch.sweep.execution.progress import Progress

TRAINING = """
    import json, os, sys, time
    import torch
    import ampatch as amp

    level, dtype = os.environ["AMPATCH_OPT_LEVEL"], os.environ.get("AMPATCH_DTYPE", "")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(factor=1.0):
        loss = model(torch.ones(8, 4)).pow(2).mean() * factor
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        return loss.item()
"""
PLAIN = """
    import sys
    import torch
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(15):
        loss = model(torch.randn(16, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())
"""
INITIALIZE = """
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3", loss_scale=1.0)
"""


def written(folder, *parts, name="train"):
    """The script made of `parts`, whose lines may be indented."""
    path = folder / f"{name}.py"
    path.write_text("".join(textwrap.dedent(part) for part in parts))
    return str(path)


def planned(folder, script, *arguments, **options):
    """A sweep in `folder/out`, in bfloat16 and without rounds of timing."""
    chosen = {"dtypes": ["bfloat16"], "rounds": 1, "out": folder / "out", **options}
    return Sweep(written(folder, script), arguments, **chosen)


def started(folder, script, *options):
    """`ampatch sweep` of a script in a process of its own, with its results in `folder/out`."""
    paths = [str(Path(ampatch.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "ampatch", "sweep", written(folder, script), "--out", "out"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # not as a shell has us
    try:
        return subprocess.Popen(
            [*command, *options],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)


def log_of(sweep, label="O0"):
    return (sweep.directory / f"runs/{label}.seed0.repeat0.log").read_text()


class Said(Progress):
    """What a sweep says, and the labels of the runs that have ended by then."""

    def __init__(self):
        self.events = []

    def ended(self, run):
        self.events.append(run.trial.label)

    def said(self, text):
        self.events.append(text)


def wait_until(condition, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def is_alive(pid):
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
