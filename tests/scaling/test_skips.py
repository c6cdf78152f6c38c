"""Skipped steps, row after row: nothing breaks, each is counted and said, and a long row once."""

import math

import pytest
import torch
from small_training import Made, backward, data, everything, pass_back, same, start, step, train
from torch import nn

import ampatch

pytestmark = pytest.mark.usefixtures("scale_lives_on")

OPTIMIZERS = {  # the host decides, or the kernel, which has two ways to
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "Adam fused": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "SGD fused": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
}


def begin(kind, level="O2", **settings):
    optimizer_class, options = OPTIMIZERS[kind]
    return start(level, optimizer_class, options=options, **settings)


@pytest.mark.parametrize(
    "kind, floor, lowest",
    [("Adam", None, 2.0**-24), ("Adam fused", 1e-40, 2.0**-126), ("SGD fused", 1.0, 1.0)],
)
def test_many_nan_steps_and_then_it_trains(kind, floor, lowest):
    model, optimizer = begin(kind, min_loss_scale=floor)
    train(model, optimizer)
    before = everything(model, optimizer)
    assert len(before) > 8
    count = 150  # a scale of 2**10 comes down to 2**-126 in 136
    for _ in range(count):
        train(model, optimizer, factor=math.nan)
        assert ampatch.step_was_skipped(optimizer)
    assert ampatch.loss_scale() == lowest
    assert same(everything(model, optimizer), before)
    assert ampatch.step_counts(optimizer) == (1, count, count)
    losses = [train(model, optimizer) for _ in range(30)]
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    counts = ampatch.step_counts(optimizer)
    assert (counts.taken, counts.skipped, counts.skipped_in_a_row) == (31, count, 0)
    assert all(type(number) is int for number in counts)


def by_hand(change):
    """`change(param)` for each parameter, which we do not see."""
    return lambda model, optimizer: [change(p) for p in ampatch.master_params(optimizer)]


ACTS = {
    "g": lambda model, optimizer: backward(model, optimizer, data()),
    "i": lambda model, optimizer: backward(model, optimizer, data(), math.inf),
    "n": lambda model, optimizer: backward(model, optimizer, data(), math.nan),
    "p": lambda model, optimizer: model(torch.ones(1, 4)).sum().backward(),  # it is not checked
    "z": lambda model, optimizer: optimizer.zero_grad(),
    "h": by_hand(lambda param: param.grad.zero_()),
    "d": by_hand(lambda param: setattr(param, "grad", None)),
    "s": lambda model, optimizer: optimizer.step(),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    "acts, skips",
    [
        ("gs z is s gs s h gs", [False, True, True, True, True, False]),  # infs stay until zeroed
        ("ps z is z ps z ps", [False, True, False, False]),  # the device counts on from the second
        ("gs z i d s gs", [False, False, False]),  # the overflow goes with its gradients
    ],
)
def test_which_steps_are_skipped(kind, acts, skips):
    model, optimizer = begin(kind)
    skipped = []
    for act in acts.replace(" ", ""):
        before = everything(model, optimizer)
        ACTS[act](model, optimizer)
        if act == "s":
            skipped.append(ampatch.step_was_skipped(optimizer))
            assert same(everything(model, optimizer), before) or not skipped[-1]
    assert skipped == skips
    assert ampatch.step_counts(optimizer) == (skips.count(False), skips.count(True), 0)
    assert all(tensor.isfinite().all() for tensor in everything(model, optimizer))


def two_branches(self, index, factor):
    """One can be fed NaN; before them is an embedding with sparse gradients."""
    x = self.table(index)
    return self.good(x.detach()).float().mean() + self.bad["head"](x).float().mean() * factor


def run(caplog, steps, *, limit=4, **settings):
    torch.manual_seed(0)
    bad = nn.ModuleDict({"head": nn.Linear(4, 2)})
    table = nn.Embedding(5, 4, sparse=True)
    model = Made(two_branches, table=table, good=nn.Linear(4, 2), bad=bad)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"max_consecutive_skips": limit, "init_scale": 1024.0, **settings}
    ampatch.initialize(model, optimizer, opt_level="O2", **settings)
    caplog.clear()
    for factor in steps:
        step(model(torch.tensor([1, 2]), factor), optimizer)
    return [record.getMessage() for record in caplog.records if "in a row" in record.message]


def test_the_report_names_parameters_and_what_to_try(caplog):
    (message,) = run(caplog, [math.inf, 1.0, *[math.nan] * 4])
    assert "4 steps of SGD in a row were skipped because gradients held inf or NaN" in message
    assert "First such gradients: table.weight, bad.head.weight, bad.head.bias. " in message
    assert "try dtype=torch.bfloat16" in message and "good" not in message
    assert caplog.records[-1].levelname == "ERROR"


def test_it_is_said_once_for_each_row(caplog):
    row = [math.inf] * 9
    assert len(run(caplog, row)) == 1
    assert len(run(caplog, [*row[:3], 1.0, *row[:3]])) == 0
    assert len(run(caplog, [*row, 1.0, *row])) == 2
    assert len(run(caplog, [math.inf, 1.0, math.inf], limit=1)) == 2


@pytest.mark.parametrize("verbosity", [0, 1])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_skip_is_a_line(kind, verbosity, scale_lives_on, caplog):
    """A fused optimizer's counts on a device are looked at every second step here."""
    caplog.set_level("INFO", "ampatch")
    model, optimizer = begin(kind, max_consecutive_skips=8, verbosity=verbosity)
    caplog.clear()
    for factor in (1.0, math.inf, math.nan, math.inf, 1.0, math.nan):
        train(model, optimizer, factor=factor)
    lines = ["a step (1 of 2", "a step (2 of 3", "a step (3 of 4", "a step (4 of 6"]
    if scale_lives_on == "device" and "fused" in kind:
        lines[1:3] = ["2 steps (3 of 4"]
    name = kind.partition(" ")[0]
    lines = [f"Gradient overflow: {name} skipped {line} since initialize)." for line in lines]
    overflows = [message for message in caplog.messages if message.startswith("Gradient")]
    assert overflows == lines * verbosity


def test_from_the_tenth_in_a_row_each_doubling_is_a_line(caplog):
    caplog.set_level("INFO", "ampatch")
    told = run(caplog, [math.nan] * 45, limit=1000)
    assert [message.rpartition(" skipped ")[2] for message in told] == [
        f"{n} steps in a row ({n} of {n} since initialize)." for n in (10, 20, 40)
    ]
    assert caplog.text.count("skipped a step") == 9


def test_a_loss_that_is_nan_itself_is_no_overflow_which_is_said_once(caplog):
    said = "The loss is inf or NaN before it is scaled"
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer)
    for number in range(4):
        loss = model(torch.ones(1, 4)).float().sum() * (1e38 if number == 0 else math.nan)
        pass_back(loss, optimizer)
        optimizer.step()
        assert caplog.text.count(said) == (number > 0)
    assert "ampatch run --debug SCRIPT, or ampatch.debug(model)" in caplog.text


def test_many_offenders_are_counted_and_those_of_no_model_named_by_their_place(caplog):
    model, alone = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)]), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([alone, *model.parameters()], lr=0.1)
    ampatch.initialize(model, optimizer, max_consecutive_skips=1)
    step((model(torch.ones(1, 2)) + alone).sum() * math.nan, optimizer)
    assert "param_groups[0]['params'][0], 0.weight, 0.bias, 1.weight, 1.bias and 4 more." in (
        caplog.text
    )


# Gradients of an earlier overflow that a script has not zeroed

LEFT_OVER = "gradients of an earlier overflow are still in p.grad; call optimizer.zero_grad()"


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_that_an_earlier_overflow_keeps_back_says_so(kind, level, scale_lives_on, caplog):
    caplog.set_level("INFO", "ampatch")
    model, optimizer = begin(kind, level, max_consecutive_skips=8, verbosity=1)
    caplog.clear()
    for step_number in range(8):
        backward(model, optimizer, data(), factor=math.inf if step_number == 0 else 1.0)
        optimizer.step()
    assert ampatch.step_counts(optimizer) == (0, 8, 8)
    assert ampatch.loss_scale() == 512.0  # one overflow
    lines = [message for message in caplog.messages if message.startswith("Gradient overflow: ")]
    says_so = [LEFT_OVER in line for line in lines]
    if scale_lives_on == "device" and "fused" in kind:
        assert says_so == [True] * len(lines)
    else:
        assert says_so == [False] + [True] * 7
    (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "8 steps of " in error.getMessage() and LEFT_OVER in error.getMessage()
    assert "0.weight" in error.getMessage() and "NaN in the data" not in error.getMessage()


@pytest.mark.parametrize(
    "acts, count", [("iss", 1), ("isisis z igs z nsz nsz nsz nsz", 0), ("ish ish ish", 0)]
)
def test_only_what_no_new_gradients_have_is_left_over(acts, count, caplog):
    """Each inf of gradients that are not zeroed, or of one of two micro-batches, is a new one."""
    caplog.set_level("INFO", "ampatch")
    model, optimizer = begin("Adam", verbosity=1, max_consecutive_skips=6)
    for act in acts.replace(" ", ""):
        ACTS[act](model, optimizer)
    assert caplog.text.count(LEFT_OVER) == count
    assert ("NaN in the data" in caplog.text) == ("n" in acts)
    steps = acts.count("s")
    assert ampatch.step_counts(optimizer) == (0, steps, steps)
