"""On a fake accelerator: what the host waits for, what moves between devices, what is measured."""

import functools
import json
import math
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from fake_accelerator import NAME, capturing, counted, installed
from situations import batches, mlp, mse
from small_training import pass_back
from small_training import step as train
from torch import nn

import ampatch
from ampatch import device_figures
from ampatch.cli import doctor
from ampatch.diagnose import speed
from ampatch.torch_private import devices

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("accelerator")]

FUSED = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {}),
    (torch.optim.Adagrad, {}),
]
OTHERS = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adam, {"foreach": True, "capturable": True}),
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.RMSprop, {"foreach": True}),
]
HEALTHY = [1.0] * 6
FACTORS = [*HEALTHY[:4], math.inf, 1.0, math.nan, math.nan, 1.0]
"""Of the losses: at a growth interval of 2 a scale of 256 grows to 1024 and falls to 128."""
LEVELS = ["O1", "O2"]
FIRST = 2  # the first steps look at the inputs; at O2 they and the tenth look at the half weights


class Attention(nn.Module):
    """Embedding, norm, attention, convolution, loss: a layer of each kind."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.into, self.norm = nn.Linear(4, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.convolution, self.batch_norm = nn.Conv1d(1, 2, 3, padding=1), nn.BatchNorm1d(2)
        self.out = nn.Linear(16, 2)

    def forward(self, x):
        x = self.norm(self.into(x)).unsqueeze(0)
        x = self.attention(x, x, x, need_weights=False)[0].squeeze(0)
        x = self.batch_norm(self.convolution(x.unsqueeze(1)))
        return self.out(torch.relu(x).flatten(1))


def steps(make_model, kind, options, factors, **settings):
    """The counts of each training step; without settings, of plain torch."""
    model = make_model().to(NAME)
    optimizer = kind(model.parameters(), lr=0.01, **options)
    if settings:
        ampatch.initialize(model, optimizer, verbosity=0, **settings)
    data = [(x.to(NAME), y.to(NAME)) for x, y in batches(len(factors))]
    results = []
    for (x, y), factor in zip(data, factors, strict=True):
        with counted() as counts:
            optimizer.zero_grad()
            loss = mse(model(x)[:, :2], y) * factor
            if settings:
                pass_back(loss, optimizer)
            else:
                loss.backward()
            optimizer.step()
        results.append(counts)
    return results


def of_each_kind(kinds):
    cases = [*((Attention, *kind) for kind in kinds), (mlp, *kinds[0])]
    return pytest.mark.parametrize(("model", "kind", "options"), cases)


def assert_nothing_moves(results):
    """Between the devices, not even a number: whatever a step needs is where the model is."""
    for counts in results:
        late = counts["launch copy to the host, not waited for"]
        assert (counts.uploads, counts.downloads - late) == (0, 0)


@pytest.mark.parametrize("level", LEVELS)
@of_each_kind(FUSED)
def test_with_fused_optimizers_the_host_never_waits(model, kind, options, level):
    options, settings = {"fused": True, **options}, {"opt_level": level, "growth_interval": 2}
    results = steps(model, kind, options, FACTORS, init_scale=256.0, **settings)[FIRST:]
    assert [counts.waits for counts in results] == [0] * len(results)
    assert ampatch.loss_scale() == 128.0
    assert_nothing_moves(results)


@pytest.mark.parametrize("level", LEVELS)
@of_each_kind(OTHERS)
def test_with_others_the_host_waits_once(model, kind, options, level):
    settings = {"opt_level": level, "growth_interval": 2, "init_scale": 256.0}
    plain = steps(model, kind, options, HEALTHY)[-1].waits
    actual = steps(model, kind, options, FACTORS, **settings)
    expected = [1 + (plain if factor == 1.0 else 0) for factor in FACTORS]
    assert [counts.waits for counts in actual[FIRST:]] == expected[FIRST:]
    assert_nothing_moves(actual[FIRST:])


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("fused", [True, False])
def test_without_loss_scaling_the_host_never_waits(fused, level):
    options = {"fused": True} if fused else {}
    settings = {"opt_level": level, "dtype": torch.bfloat16}
    results = steps(Attention, torch.optim.SGD, options, HEALTHY, **settings)[FIRST:]
    assert [counts.waits for counts in results] == [0] * len(results)


def test_a_long_row_of_skips_is_noticed_without_a_wait(caplog):
    model = mlp().to(NAME)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    ampatch.initialize(model, optimizer, max_consecutive_skips=8)
    x = torch.ones(1, 4, device=NAME)
    waits = []
    for _ in range(12):
        with counted() as counts:
            train(model(x).sum() * math.nan, optimizer)
        waits.append((counts.waits, "steps of Adam in a row" in caplog.text))
    assert waits[-1][1]
    assert all(not count for count, told in waits[1:] if not told)
    assert ampatch.step_counts(optimizer).skipped == 12


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_can_be_captured(level):
    """Whoever waits while a graph is captured gets an error, as on CUDA: inputs are not looked at,
    nor the counts, at which so few skips would have each step look."""
    model = mlp().to(NAME)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True, capturable=True)
    ampatch.initialize(model, optimizer, opt_level=level, max_consecutive_skips=4, verbosity=0)
    x, y = (tensor.to(NAME) for tensor in next(batches(1)))
    with capturing():
        assert model(x).dtype is (torch.float16 if level == "O1" else torch.float32)
        with pytest.raises(RuntimeError, match="captured"):
            x.sum().item()
    for capture in (nullcontext, capturing):
        with capture():
            for _ in range(4):
                train(mse(model(x), y), optimizer)
    assert ampatch.step_counts(optimizer) == (8, 0, 0)


def test_each_stream_has_its_own_buckets():
    tensor, other = torch.ones(2, device=NAME), torch.Stream(device=NAME)
    here = devices.device_and_stream(tensor)
    with other:
        assert devices.device_and_stream(tensor) != here
    assert devices.device_and_stream(tensor) == here


def test_fused_optimizers_of_apex_use_the_kernels_of_the_device():
    import ampatch.compat.apex  # noqa: F401
    from ampatch.compat.apex.optimizers import FusedAdam

    assert FusedAdam(mlp().to(NAME).parameters(), lr=0.1).param_groups[0]["fused"]
    assert not FusedAdam(mlp().parameters(), lr=0.1).param_groups[0]["fused"]


def test_autocast_and_casts_are_the_devices_and_work_of_the_host_stays_float32():
    model = mlp().to(NAME)
    ampatch.initialize(model, dtype=torch.bfloat16, patch_scope="process", verbosity=0)
    assert torch.is_autocast_enabled(NAME) and not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype(NAME) is torch.bfloat16
    for device, dtype in (("cpu", torch.float32), (NAME, torch.bfloat16)):
        operands = [torch.ones(2, 4, device=device), torch.ones(3, 4, device=device)]
        assert torch.nn.functional.linear(*operands).dtype is dtype


def linears(layers, width=8):
    torch.manual_seed(0)
    middle = [nn.Linear(width, width) for _ in range(layers)]
    return nn.Sequential(nn.Linear(4, width), *middle)


def launches(layers, width, level):
    """Of one step beyond what a step of FP32 launches."""
    results = []
    for settings in ({}, {"opt_level": level, "dtype": torch.bfloat16}):
        make = functools.partial(linears, layers, width)
        counts = steps(make, torch.optim.SGD, {"fused": True}, [1.0] * 4, **settings)
        results.append(counts[-1].launches)
        ampatch.deactivate()
    return results[1] - results[0]


@pytest.mark.parametrize(
    ("layers", "width", "level", "most"),
    [
        (40, 8, "O1", 6 + 9),  # 82 weights in three buckets, each cast down and its gradients up
        (40, 8, "O2", 20),
        (40, 8, "O3", 6),
        (6, 1100, "O1", 6 + 2 * 2),  # of 4.8 MB: a list is one kernel, so that they share buckets
    ],
)
def test_weights_are_cast_and_compared_in_lists(layers, width, level, most):
    assert launches(layers, width, level) <= most


def test_large_weights_are_compared_in_few_kernels():
    """Of 1.2 million elements each: not in parts that are made for the cache of a CPU."""
    assert launches(4, 1100, "O2") - launches(2, 1100, "O2") <= 2 * 8


def test_a_model_on_two_devices(opt_level, half):
    """Against FP32 on the same devices; what is on the host stays there."""

    def trained(**settings):
        torch.manual_seed(0)
        first, second = nn.Linear(4, 8), nn.Linear(8, 2).to(NAME)
        model = nn.ModuleList([first, second])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if settings:
            ampatch.initialize(model, optimizer, verbosity=0, init_scale=256.0, **settings)
        for x, y in batches(4):
            loss = mse(second(torch.tanh(first(x)).to(NAME)).float(), y[:, :2].to(NAME))
            pass_back(loss, optimizer) if settings else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        held = ampatch.master_params(optimizer) if settings else model.parameters()
        return [param.detach().float() for param in held]

    plain, ours = trained(), trained(opt_level=opt_level, dtype=half)
    assert [param.device.type for param in ours] == ["cpu", "cpu", NAME, NAME]
    for reference, other in zip(plain, ours, strict=True):
        torch.testing.assert_close(reference, other, atol=0.02, rtol=0)


CLASSES = torch.tensor([1, 2, 3, -100])
CROSS_ENTROPIES = {
    "mean": ((4, 8), CLASSES, {}),
    "none": ((4, 8), CLASSES, {"reduction": "none"}),
    "sum": ((4, 8), torch.arange(4), {"reduction": "sum", "ignore_index": 2}),
    "bytes": ((4, 8), CLASSES.abs().to(torch.uint8), {"ignore_index": 100}),
    "one row": ((8,), torch.tensor(3), {}),
    "pictures": ((2, 8, 2), torch.tensor([[1, 2], [3, 4]]), {}),
    "smooth": ((4, 8), CLASSES, {"label_smoothing": 0.1}),
    "probabilities": ((4, 8), torch.rand(4, 8), {}),
}


def of_half_and_of_fp32(function, shape):
    """Results and gradients of half inputs, and of a copy of them in FP32."""
    ampatch.initialize(mlp().to(NAME), patch_scope="process", verbosity=0)
    x, results = torch.randn(shape, device=NAME).half(), []
    for copied in (lambda leaf: leaf, torch.Tensor.float):
        leaf = x.clone().requires_grad_()
        result = function(copied(leaf))
        assert result.dtype is torch.float32
        result.square().sum().backward()
        results.append((result.detach().cpu(), leaf.grad.cpu()))
    return results


@pytest.mark.parametrize("case", CROSS_ENTROPIES)
def test_cross_entropy_of_half_logits_is_that_of_a_copy_in_fp32(case):
    shape, target, options = CROSS_ENTROPIES[case]

    def loss_of(logits):
        return torch.nn.functional.cross_entropy(logits, target.to(NAME), **options)

    assert all(map(torch.equal, *of_half_and_of_fp32(loss_of, shape)))


TOTALS = {
    "norm": lambda x: torch.norm(x),
    "norm of rows": lambda x: x.norm(3, dim=1, keepdim=True),
    "nuclear": lambda x: torch.norm(x, p="nuc"),
    "matrix": lambda x: torch.linalg.matrix_norm(x),
    "vector": lambda x: torch.linalg.vector_norm(x, 2, dim=1),
    "normalize": torch.nn.functional.normalize,
    "sum": lambda x: torch.sum(x, 0, True),
    "sum of all": lambda x: x.sum(),
    "product": lambda x: x.prod(dim=1),
    "cumprod": lambda x: torch.cumprod(x, 0),
    "cumsum": lambda x: x.cumsum(dim=0),
    "softmax": lambda x: torch.special.softmax(x, 1),
    "module": torch.nn.Softmax(0),
    "open dtype": lambda x: torch.softmax(x, 1, None),
    "open dtype by name": lambda x: x.log_softmax(1, dtype=None),
    "input by name": lambda x: torch.softmax(input=x, dim=1),
}


@pytest.mark.parametrize("name", TOTALS)
def test_float_functions_have_the_results_of_a_copy_in_fp32(name):
    for ours, expected in zip(*of_half_and_of_fp32(TOTALS[name], (4, 8)), strict=True):
        # a sum may be made in another order
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


# A sweep, `ampatch doctor`, reports, and what is measured there

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


def watched_training(device, watch, size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, init_scale=256.0, verbosity=0)
    x = (size * torch.randn(6, 4)).to(device)
    with watch(model) as seen:
        for factor in (1.0, 1e-6, float("inf")):
            train(model(x).square().mean() * factor, optimizer)
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
    there, here = (told(watched_training(device, watch, size)) for device in (NAME, "cpu"))
    assert there == here
    assert names in there


def test_moments_are_the_devices_and_nothing_waits_for_them():
    tensor = torch.ones(2, device=NAME)
    here = tensor.device
    device_figures.record_time(here)  # asks once what the device can do
    with counted() as counts:
        moments = [device_figures.record_time(here), tensor + 1, device_figures.record_time(here)][
            ::2
        ]
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
