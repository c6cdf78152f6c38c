"""Row after row of skipped steps: nothing breaks, it is counted, and it is said once, usefully."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from small_training import everything, same, start
from torch import nn

import ampatch

pytestmark = pytest.mark.usefixtures("scale_lives_on")

OPTIMIZERS = {  # the host decides, or the kernel, which has two ways to
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "Adam fused": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "SGD fused": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
}


def step(model, optimizer, factor=1.0, zero=True):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    loss = (model(x).float() - 1.0).square().mean() * factor
    with ampatch.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    if zero:
        optimizer.zero_grad()
    return loss.item()


def begin(kind, level="O2", **settings):
    optimizer_class, options = OPTIMIZERS[kind]
    return start(level, optimizer_class, options=options, **settings)


@pytest.mark.parametrize(
    "kind, floor", [*((kind, None) for kind in OPTIMIZERS), ("Adam", 1.0), ("Adam", 1e-40)]
)
def test_many_nan_steps_and_then_it_trains(kind, floor):
    model, optimizer = begin(kind, min_loss_scale=floor)
    step(model, optimizer)
    before = everything(model, optimizer)
    assert len(before) > 8
    count = 150  # a scale of 2**10 comes down to 2**-126 in 136
    for _ in range(count):
        step(model, optimizer, math.nan)
        assert ampatch.step_was_skipped(optimizer)
    scale = ampatch.loss_scale()
    assert math.isfinite(scale) and scale == {None: 2.0**-24, 1.0: 1.0, 1e-40: 2.0**-126}[floor]
    assert same(everything(model, optimizer), before)
    assert ampatch.step_counts(optimizer) == (1, count, count)
    first = step(model, optimizer)
    assert not ampatch.step_was_skipped(optimizer)
    losses = [step(model, optimizer) for _ in range(30)]
    assert all(map(math.isfinite, losses)) and losses[-1] < first
    assert ampatch.step_counts(optimizer) == (32, count, 0)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("then", ["step", "backward and step"])
def test_a_second_step_on_infinite_gradients_is_skipped_too(kind, then):
    """They were not zeroed."""
    model, optimizer = begin(kind)
    step(model, optimizer)
    before = everything(model, optimizer)
    step(model, optimizer, math.inf, zero=False)
    for _ in range(3):
        if then == "step":
            optimizer.step()
        else:
            step(model, optimizer, zero=False)
        assert ampatch.step_was_skipped(optimizer)
    assert same(everything(model, optimizer), before)
    for parameter in ampatch.master_params(optimizer):
        parameter.grad.zero_()  # by hand, where we do not see it
    step(model, optimizer)
    assert not ampatch.step_was_skipped(optimizer)
    assert all(tensor.isfinite().all() for tensor in everything(model, optimizer))


# The report


class Net(nn.Module):
    """Two branches, of which one can be fed NaN; an embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=True)
        self.good, self.bad = nn.Linear(4, 2), nn.ModuleDict({"head": nn.Linear(4, 2)})

    def forward(self, index, factor):
        x = self.table(index)
        return self.good(x.detach()).float().mean() + self.bad["head"](x).float().mean() * factor


def run(caplog, steps, *, limit=4, **settings):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"max_consecutive_skips": limit, "init_scale": 1024.0, **settings}
    ampatch.initialize(model, optimizer, opt_level="O2", **settings)
    caplog.clear()
    for factor in steps:
        optimizer.zero_grad()
        loss = model(torch.tensor([1, 2]), factor)
        with ampatch.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return [record.getMessage() for record in caplog.records if "in a row" in record.message]


def test_the_report_names_parameters_history_and_what_to_try(caplog):
    (message,) = run(caplog, [1.0, *[math.nan] * 4])
    assert "4 steps of SGD in a row were skipped because gradients held inf or NaN" in message
    assert "First such gradients: table.weight, bad.head.weight, bad.head.bias. " in message
    assert "The loss scale went 1024 -> 512 -> 256 -> 128 -> 64." in message
    assert "try dtype=torch.bfloat16" in message and "good" not in message
    assert caplog.records[-1].levelname == "ERROR"


def test_it_is_said_once_for_each_row(caplog):
    row = [math.inf] * 9
    assert len(run(caplog, row)) == 1
    assert len(run(caplog, [*row[:3], 1.0, *row[:3]])) == 0
    assert len(run(caplog, [*row, 1.0, *row])) == 2
    assert len(run(caplog, [math.inf, 1.0, math.inf], limit=1)) == 2


def test_a_long_history_is_shortened(caplog):
    (message,) = run(caplog, [math.inf] * 20, limit=20)
    assert "went 1024 -> 512 -> 256 -> 128 -> ... -> 0.0078125 -> 0.00390625 -> " in message
    (message,) = run(caplog, [math.inf] * 50, limit=50, num_losses=2)
    assert "The loss scale of loss 1 is at 1024." in message
    assert "-> 5.96046e-08." in message and message.count("->") == 8  # the floor, once


def test_fused_optimizers_report_too(caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    ampatch.initialize(model, optimizer, opt_level="O2", max_consecutive_skips=3)
    for _ in range(7):
        step(model, optimizer, math.nan, zero=False)
        optimizer.zero_grad()
    said = [r.getMessage() for r in caplog.records if "in a row" in r.getMessage()]
    assert len(said) == 1 and "3 steps of AdamW in a row" in said[0]
    assert "First such gradients: 0.weight, 0.bias, 1.weight, 1.bias." in said[0]


def test_a_parameter_of_no_model_is_named_by_its_place(caplog):
    model, alone = nn.Linear(2, 1), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), alone], lr=0.1)
    ampatch.initialize(model, optimizer, max_consecutive_skips=1)
    with ampatch.scale_loss((alone * math.inf).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert "First such gradients: param_groups[0]['params'][2]." in caplog.text


def test_many_offenders_are_counted(caplog):
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, max_consecutive_skips=1)
    with ampatch.scale_loss(F.relu(model(torch.ones(1, 2)) + 1).sum() * math.nan, optimizer) as s:
        s.backward()
    optimizer.step()
    assert "0.weight, 0.bias, 1.weight, 1.bias, 2.weight and 3 more." in caplog.text


# Counts


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_are_counted(kind):
    model, optimizer = begin(kind)
    assert ampatch.step_counts(optimizer) == (0, 0, 0)
    seen = []
    for factor in (1.0, math.inf, math.nan, 1.0, -math.inf):
        step(model, optimizer, factor)
        seen.append(tuple(ampatch.step_counts(optimizer)))
    assert seen == [(1, 0, 0), (1, 1, 1), (1, 2, 2), (2, 2, 0), (2, 3, 1)]
    counts = ampatch.step_counts(optimizer)
    assert (counts.taken, counts.skipped, counts.skipped_in_a_row) == (2, 3, 1)
    assert all(type(count) is int for count in counts)


def test_counts_go_on_when_a_fused_optimizer_stops_looking():
    """Gradients of a plain backward are not checked; the host decides and says so."""
    model, optimizer = begin("Adam fused", "O1")
    step(model, optimizer, math.inf)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert ampatch.step_counts(optimizer) == (2, 1, 0)


def test_counts_of_a_disabled_or_unknown_optimizer():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ampatch.AmpatchError, match=r"step_counts.*no ampatch session is open"):
        ampatch.step_counts(optimizer)
    kept = ampatch.initialize(nn.Linear(2, 1), verbosity=0)
    with pytest.raises(ampatch.AmpatchError, match=r"step_counts\(<SGD>\).*not given"):
        ampatch.step_counts(optimizer)
    del kept
    ampatch.deactivate()
    ampatch.initialize(model, optimizer, enabled=False)
    assert ampatch.step_counts(optimizer) == (0, 0, 0)
    assert not ampatch.step_was_skipped(optimizer)
