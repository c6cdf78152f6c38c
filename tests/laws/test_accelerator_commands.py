"""On a fake accelerator: a sweep, `ampatch doctor`, reports, and what is measured there."""

import json
import os
import subprocess
import sys

import pytest
import torch
from fake_accelerator import NAME, counted, installed
from small_training import step
from torch import nn

import ampatch
from ampatch import device_figures
from ampatch.cli import doctor
from ampatch.diagnose import speed

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("accelerator")]

SCRIPT = """
import torch
import ampatch

device = torch.accelerator.current_accelerator()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)
ampatch.initialize(model, optimizer)
x = torch.randn(64, 4, device=device)
for _ in range(12):
    optimizer.zero_grad()
    with ampatch.scale_loss((model(x) - x.sum(1, keepdim=True)).square().mean(), optimizer) as loss:
        loss.backward()
    optimizer.step()
"""


def python(folder, *arguments):
    """Python in `folder`, where the device is one that a package brings."""
    path = os.pathsep.join(installed(folder))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_a_sweep(tmp_path):
    """The trials' processes find the device as they find one that a package brings."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ["--levels", "O0,O2", "--dtypes", "float16", "--no-autocast", "--rounds", "1"]
    done = python(tmp_path, "-m", "ampatch", "sweep", "train.py", "--out", "found", *options)
    logs = [path.read_text() for path in sorted(tmp_path.glob("found/runs/*.log"))]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    summary = json.loads((tmp_path / "found" / "summary.json").read_text())
    assert summary["provenance"]["device"] == NAME
    exact, half = summary["rows"]
    assert exact["status"] == half["status"] == "ok", "\n".join(logs)
    assert exact["memory_kind"] == half["memory_kind"] == "device"
    least = 4 * (4 * 512 + 512 + 512 + 1) + 64 * 512 * 4  # weights; what the hidden layer gives
    assert least < exact["memory_bytes"] < 5 * least
    for row in (exact, half):  # the time of the device is counted in launches
        assert row["cpu_ms"] is None and row["step_ms"] == int(row["step_ms"]) > 10
    assert half["step_ms"] > exact["step_ms"]


LATE = """
import os
import threading
import weakref

import torch

def be_late(gradient):
    # The thread of the device then has its core only while the main thread waits.
    os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    held.append(weakref.ref(torch._C._get_obj_in_tls("context")))

held = []
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
weight = torch.ones(3, device=torch.accelerator.current_accelerator(), requires_grad=True)
weight.register_hook(be_late)
for number in range(500):
    weight.sum().backward()
    late = held[-1]() is not None
    if late and number >= 20:
        break
"""

TRIAL = """
import json
import sys
from pathlib import Path
from ampatch.launch.program import Program
from ampatch.sweep import Trial
from ampatch.sweep.execution import child
from ampatch.sweep.execution.runner import Runner
from ampatch.sweep.json_files import to_json
from ampatch.sweep.trial import BASE

runner = Runner(Program("late.py"), [], Path())
order = {"runner": runner, "trial": Trial(BASE), "guard": None, "list_imports": False}
assert child.run(json.loads(json.dumps(to_json(order)))) == 0
script = sys.modules["__main__"]
assert script.late
assert script.held[-1]() is None
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="threads have no priorities here")
def test_a_trial_does_not_end_while_a_thread_drops_what_it_held_for_a_backward_pass(tmp_path):
    """Such a thread asks for the interpreter's lock; a process that ends meanwhile is aborted."""
    (tmp_path / "late.py").write_text(LATE)
    done = python(tmp_path, "-c", TRIAL)
    assert done.returncode == 0, done.stderr


def test_doctor_names_and_times_the_device(monkeypatch):
    monkeypatch.setattr(speed, "MIN_ROUNDS", 3)
    monkeypatch.setattr(speed, "MAX_SECONDS", 0)
    calls = []

    def operations(device, dtype):
        ones = torch.ones(2, device=device, dtype=dtype)
        return {"sum": lambda: calls.append((ones + ones).device.type)}

    monkeypatch.setattr(speed, "operations", operations)
    with counted() as counts:
        results = doctor.as_dict()
    assert results["accelerators"] == [f"{NAME}:0"]
    assert results["speed"].keys() == {"cpu", NAME}
    assert calls.count(NAME) == calls.count("cpu") > 9
    assert counts["wait device"] == calls.count(NAME)  # or the launch alone would be timed


def trained(device, watch, size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, init_scale=256.0, verbosity=0)
    x = (size * torch.randn(6, 4)).to(device)
    with watch(model) as seen:
        for factor in (1.0, 1e-6, float("inf")):
            step(model(x).square().mean() * factor, optimizer)
    ampatch.deactivate()
    return seen


@pytest.mark.parametrize(
    ("watch", "size", "told", "names"),
    [
        (lambda model: ampatch.report(), 1.0, str, "layer_norm"),
        (ampatch.gradient_range, 1.0, lambda seen: str(seen.report()), "0.weight"),
        (ampatch.debug, 1e30, lambda seen: str(seen.report), "Linear"),
    ],
    ids=["report", "gradient_range", "debug"],
)
def test_what_is_told_of_a_training_is_what_is_told_on_the_cpu(watch, size, told, names):
    there, here = (told(trained(device, watch, size)) for device in (NAME, "cpu"))
    assert there == here
    assert names in there


def test_moments_are_the_devices_and_nothing_waits_for_them():
    tensor = torch.ones(2, device=NAME)
    here = tensor.device
    device_figures.moment(here)  # asks once what the device can do
    with counted() as counts:
        moments = [device_figures.moment(here), tensor + 1, device_figures.moment(here)][::2]
    assert counts.waits == 0
    assert device_figures.seconds_between(moments) == [0.001]  # a launch is a millisecond


def test_the_peak_of_memory_is_the_devices():
    torch.accelerator.reset_peak_memory_stats()
    before = device_figures.peak_memory() or 0
    torch.ones(1000, device=NAME)
    assert device_figures.peak_memory() == before + 4000


def test_what_seeds_the_device_is_known():
    """A sweep gives what a script seeds by itself the seed of the trial."""
    assert device_figures.seeding_functions()[f"torch.{NAME}.manual_seed"][0] == f"torch.{NAME}"
