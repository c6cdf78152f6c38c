"""`ampatch.report`: casts counted by hand in small cases."""

import json
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from small_training import Made
from torch import nn

import ampatch

HALF = torch.bfloat16


def initialized(model, level="O1", **settings):
    settings = {"patch_scope": "process", "verbosity": 0, **settings}
    return ampatch.initialize(model, opt_level=level, dtype=HALF, **settings)


def test_a_linear_at_o1_in_numbers_text_and_json():
    """First forward: input, weight and bias are cast; in the second the input alone."""
    model = initialized(nn.Linear(4, 8))
    x = torch.ones(2, 4)
    with ampatch.report(model) as report:
        model(x)
        model(x)
    calls = report.functions["torch.nn.functional.linear"]
    assert (calls.calls, calls.casts, calls.cached) == (2, 4, 2)
    assert calls.bytes == 2 * (2 * (2 * 4) + 4 * 8 + 8)  # 2 bytes: x twice, weight, bias once
    assert calls.to == {HALF: 6}
    batches = report.batches
    assert (batches.batches, batches.weights, batches.bytes) == (1, 2, 2 * (4 * 8 + 8))
    text = str(report)
    line = next(line for line in text.splitlines() if line.startswith("torch.nn.functional.linear"))
    assert line.split()[1:5] == ["2", "4", "2", str(calls.bytes)]
    assert "Nothing to speed up was found" in text
    as_json = json.loads(json.dumps(report.as_dict()))
    assert as_json["functions"]["torch.nn.functional.linear"]["to"] == {"bfloat16": 6}
    assert as_json["modules"][""]["takes"] == ["float32"] and as_json["advice"] == []


def tied():
    weight = nn.Parameter(torch.ones(4, 4))
    return Made(lambda self, x: F.linear(F.linear(x, self.weight), self.weight), weight=weight)


@ampatch.half_function
def doubled(x):
    """A function of the user's, which Dynamo traces."""
    return x * 2


def outside_of_a_forward(model):
    for _ in range(3):
        F.linear(torch.ones(1, 4), model.weight)


def three_exps(model):
    torch.exp(torch.ones(4, dtype=HALF))
    torch.exp(torch.ones(4))
    with ampatch.disable_casts():
        torch.exp(torch.ones(4, dtype=HALF))


COUNTED = {  # the model, what is called, the function, and its calls, casts, cached and bytes
    "a weight twice": (tied, lambda m: m(torch.ones(1, 4)), "linear", (2, 2, 1, 40)),
    "outside": (lambda: nn.Linear(4, 4), outside_of_a_forward, "linear", (3, 6, 0, 120)),
    "to FP32": (tied, three_exps, "torch.exp", (3, 1, 0, 16)),
    "promoted": (tied, lambda m: torch.addcmul(torch.ones(4, dtype=HALF), *torch.ones(2, 4)),
                 "addcmul", (1, 1, 0, 16)),
    "banned": (tied, lambda m: F.binary_cross_entropy(*torch.full((2, 4), 0.5, dtype=HALF)),
               "binary_cross_entropy", (1, 2, 0, 32)),
    "the user's": (tied, lambda m: doubled(torch.ones(4)), "doubled", (1, 1, 0, 8)),
}  # fmt: skip


@pytest.mark.parametrize("make, call, name, counts", COUNTED.values(), ids=COUNTED)
def test_calls_casts_and_bytes(make, call, name, counts):
    model = initialized(make())
    with ampatch.report(model) as report:
        call(model)
    [calls] = [calls for key, calls in report.functions.items() if key.endswith(name)]
    assert (calls.calls, calls.casts, calls.cached, calls.bytes) == counts


def test_a_bounce_is_found_also_through_a_view():
    initialized(nn.Linear(1, 1))
    x = torch.ones(4, 4)
    with ampatch.report() as report:
        weights = torch.mm(x, x).softmax(-1)
        torch.mm(weights.view(2, 2, 4).reshape(4, 4), x)
        torch.mm(x, x)  # FP32 from outside: no bounce
        torch.mm(x.softmax(-1), x)  # its input was FP32: no bounce
    (pair,) = report.bounces
    assert pair == ("torch.Tensor.softmax", "torch.mm")
    assert (report.bounces[pair].times, report.bounces[pair].bytes) == (1, 32)
    (tip,) = [tip for tip in report.advice() if "casts its result back" in tip]
    assert "torch.Tensor.softmax" in tip and "torch.mm" in tip


@pytest.mark.parametrize(
    "level, takes, gives",
    [
        ("O0", torch.float32, torch.float32),
        ("O1", torch.float32, HALF),
        ("O2", HALF, HALF),
        ("O3", HALF, HALF),
    ],
)
def test_dtypes_of_modules(level, takes, gives):
    model = initialized(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), level)
    with ampatch.report(model) as report:
        model(torch.ones(4, 8))
    use = report.modules["0"]
    assert (use.kind, use.calls, use.takes, use.gives) == ("Linear", 1, {takes}, {gives})
    assert set(report.modules) == {"", "0", "1"}
    # On the CPU batch_norm has a row at each of these levels: with half weights it sums in half.
    casting = {name for name, use in report.functions.items() if use.casts}
    rest = set(report.functions) - {"torch.batch_norm"}
    assert (bool(casting), bool(rest)) == ((True, True) if level == "O1" else (False, False))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (None, 'initialize(..., opt_level="O1") was not called.'),
        ({"opt_level": "O0"}, "ampatch is at O0 or disabled."),
        ({"opt_level": "O1", "enabled": False}, "ampatch is at O0 or disabled."),
        ({"opt_level": "O1"}, "casts are off, or the model called no"),
    ],
)
def test_why_nothing_was_in_half(settings, why):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampatch.report() as report:
        if settings is not None:
            ampatch.initialize(model, optimizer, verbosity=0, **settings)
        with ampatch.disable_casts():
            model(torch.ones(1, 8))
        ampatch.deactivate()
    [advice] = report.advice()
    assert "Nothing ran in half precision" in advice and why in advice
    is_called = why.startswith("casts are off")
    assert is_called != ("No function that ampatch casts was called" in str(report))


def test_an_exception_in_a_call_does_not_shift_the_counts():
    initialized(nn.Linear(1, 1))
    x = torch.ones(2, 3)
    with ampatch.report() as report:
        with pytest.raises(RuntimeError):
            torch.mm(x, x)
        torch.exp(torch.ones(2, dtype=HALF))
    assert report.functions["torch.mm"].casts == 2
    assert report.functions["torch.exp"].casts == 1


def test_threads_that_begin_earlier_and_later_are_counted():
    initialized(nn.Linear(1, 1))
    x, may_go_on = torch.ones(2, 2), threading.Event()

    def multiply():
        may_go_on.wait()
        torch.mm(x, x)

    earlier = threading.Thread(target=multiply)
    earlier.start()
    with ampatch.report() as report:
        later = threading.Thread(target=multiply)
        later.start()
        may_go_on.set()
        earlier.join()
        later.join()
    assert (report.functions["torch.mm"].calls, report.functions["torch.mm"].casts) == (2, 4)


def test_two_reports_beside_a_profiler_see_the_same():
    model, x = initialized(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))), torch.ones(2, 4)
    seen = []
    sys.setprofile(lambda frame, event, arg: seen.append(event))
    try:
        with ampatch.report(model) as first, ampatch.report() as second:
            model(x)
    finally:
        sys.setprofile(None)
    assert first.functions == second.functions and first.batches == second.batches
    assert "call" in seen
    before = str(first.functions)
    model(x)
    assert str(first.functions) == before


def test_code_that_is_compiled_under_a_report_runs_as_without():
    initialized(nn.Linear(1, 1))
    x = torch.eye(3)

    def function(x):
        return doubled(torch.matrix_power(F.linear(x, x).softmax(-1), 2)), F.l1_loss(x, x)

    expected = function(x)
    with ampatch.report() as report:
        compiled = torch.compile(function, backend="eager", fullgraph=True)(x)
    assert torch.equal(compiled[0], expected[0]) and torch.equal(compiled[1], expected[1])
    assert not [name for name in report.functions if name.endswith("doubled")]


def test_two_models_of_one_class_are_counted_apart():
    """A GAN's; modules without weights, made anew in each step, are one."""
    generator, critic = (initialized(nn.Sequential(nn.Linear(4, 4), nn.ReLU())) for _ in range(2))
    with ampatch.report() as report, ampatch.report(generator) as own:
        for _ in range(3):
            nn.MSELoss()(critic(generator(torch.ones(2, 4))).float(), torch.ones(2, 4))
    calls = {name: use.calls for name, use in report.modules.items()}
    both = {f"Sequential{n}{part}": 3 for n in ("", "#2") for part in ("", ".0", ".1")}
    assert calls == {**both, "MSELoss": 3}
    assert set(own.modules) == {"", "0", "1"}
