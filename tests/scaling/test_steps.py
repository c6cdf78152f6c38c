"""The step is still the optimizer's: its signature, its result, its hooks and its ranges; skips.

torch wraps `step` and `zero_grad` in ranges for the profiler and loops over hooks.  They are left
out only where they have no effect.  A fused kernel may skip the step on the device.
"""

import functools
import inspect
import math

import pytest
import torch
from frames import entered
from small_training import Made, backward, data, everything, pass_back, same, seeded, start, train
from small_training import step as whole_step
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import StepLR

import ampatch
from ampatch.torch_private import optimizers as torch_optimizers


class Answers(torch.optim.SGD):
    def step(self, closure=None, *, note: str = "none"):
        """What it does."""
        super().step(closure)
        return {"note": note}


@pytest.mark.usefixtures("scale_lives_on")
@pytest.mark.parametrize("level", ["O1", "O3"])  # with a flag of overflow and without
def test_step_returns_what_the_optimizer_returns(level):
    model, optimizer = start(level, Answers)
    backward(model, optimizer, data())
    assert optimizer.step(note="kept") == {"note": "kept"}
    assert optimizer.step.__doc__ == "What it does."


@pytest.mark.parametrize("scheduled", [False, True])
def test_step_keeps_its_signature(scheduled):
    model = seeded()
    optimizer = Answers(model.parameters(), lr=0.1)
    before = inspect.signature(optimizer.step)
    if scheduled:
        StepLR(optimizer, 1)
    ampatch.initialize(model, optimizer, verbosity=0)
    assert inspect.signature(optimizer.step) == before and "note" in before.parameters


def test_nothing_is_recorded_while_no_profiler_runs():
    """The gain: plain torch opens a range around each, though no profiler reads it."""
    model, optimizer = start("O1")
    train(model, optimizer)
    names = [code.co_name for code in entered(train, model, optimizer)]
    assert "record_function" not in " ".join(names)
    ampatch.deactivate()
    codes = entered(lambda: (optimizer.step(), optimizer.zero_grad()))
    wrappers = [code for code in codes if code.co_name == "wrapper"]
    assert len(wrappers) == 1, "torch's own wrapper around step has another name by now"


@pytest.mark.parametrize("lacking", ["CODE_AROUND_STEPS", "is_profiling"])
def test_a_torch_that_lets_us_see_less_gets_the_whole_call(lacking, monkeypatch):
    model, optimizer = start("O1")
    less = None if lacking == "CODE_AROUND_STEPS" else lambda: True
    monkeypatch.setattr(torch_optimizers, lacking, less)
    assert "wrapper" in [code.co_name for code in entered(train, model, optimizer)]


def test_a_profiler_sees_both_ranges():
    model, optimizer = start("O1")
    train(model, optimizer)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        train(model, optimizer)
    seen = {event.key for event in profile.key_averages()}
    assert {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"} <= seen


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_of_all_optimizers_run(when):
    model, optimizer = start("O1")
    train(model, optimizer)
    seen = []
    register = getattr(torch_optimizer, f"register_optimizer_step_{when}_hook")
    handle = register(lambda *_: seen.append("hook"))
    train(model, optimizer)
    handle.remove()
    train(model, optimizer)
    assert seen == ["hook"]


def test_methods_that_others_have_wrapped_are_called(monkeypatch):
    """`functools.wraps` hands all torch's marks on to the wrapper, `__wrapped__` too."""
    seen = []

    class Optimizer(torch.optim.SGD):
        pass

    Optimizer([nn.Parameter(torch.zeros(1))], lr=0.1)  # torch has wrapped the class's step

    def noticing(name):
        inner = getattr(Optimizer, name)

        @functools.wraps(inner)
        def wrapper(*args, **kwargs):
            seen.append(name)
            return inner(*args, **kwargs)

        return wrapper

    for name in ("step", "zero_grad"):
        monkeypatch.setattr(Optimizer, name, noticing(name))
    train(*start("O1", Optimizer))
    assert seen == ["zero_grad", "step"]


# Steps that the device itself skips; other waits are counted by tests/laws/test_accelerator.py


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def training_step(model, optimizer, x, factor=1.0):
    whole_step(model(x).float().square().mean() * factor, optimizer)


FUSED = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]


@pytest.mark.usefixtures("scale_lives_on")
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_fused_sgd_whose_first_step_overflows_has_no_garbage_for_momentum(dampening):
    """torch's kernel leaves the buffer it was to fill uninitialized.  Beside SGD in its loop."""
    results = []
    for fused, factors in ((True, [math.inf, 1.0, 1.0]), (False, [1.0, 1.0])):
        model = two_layers()
        options = {"lr": 0.1, "momentum": 0.9, "dampening": dampening, "fused": fused}
        optimizer = torch.optim.SGD(model.parameters(), **options)
        ampatch.initialize(model, optimizer, verbosity=0)
        for factor in factors:
            ampatch.set_loss_scale(256.0)
            junk = [torch.full(p.shape, 1e30) for p in model.parameters()]
            del junk  # what uninitialized memory is likely to hold next
            training_step(model, optimizer, torch.ones(1, 4), factor)
        results.append([p.detach().clone() for p in ampatch.master_params(optimizer)])
        ampatch.deactivate()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("scale_lives_on")
def test_a_group_that_is_not_fused_does_not_step_on_inf():
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    groups = [{"params": [first]}, {"params": [second], "fused": False}]
    optimizer = torch.optim.Adam(groups, lr=0.1, fused=True)
    ampatch.initialize(nn.ParameterList([first, second]), optimizer, verbosity=0)
    whole_step((first + second).sum() * math.inf, optimizer)
    assert ampatch.step_was_skipped(optimizer)
    assert torch.equal(first, torch.ones(3)) and torch.equal(second, torch.ones(3))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_step_is_captured_in_a_cuda_graph(kind, level):
    """Replays train, skip on overflow and count, with no wait and no Python."""
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)).cuda()
    optimizer = kind(model.parameters(), lr=0.01, fused=True, capturable=True)
    ampatch.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.randn(8, 16, device="cuda")

    def one_step():
        loss = model(x).float().square().mean()
        whole_step(loss, optimizer)
        return loss

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            first = one_step().item()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = one_step()
    before = ampatch.step_counts(optimizer)
    for _ in range(20):
        graph.replay()
    assert loss.item() < first and not ampatch.step_was_skipped(optimizer)
    weights = [p.detach().clone() for p in ampatch.master_params(optimizer)]
    scale, healthy = ampatch.loss_scale(), x.clone()
    x.fill_(math.nan)
    graph.replay()
    assert ampatch.step_was_skipped(optimizer) and ampatch.loss_scale() == scale / 2
    assert all(map(torch.equal, weights, ampatch.master_params(optimizer)))
    x.copy_(healthy)
    graph.replay()
    counts = ampatch.step_counts(optimizer)
    assert (counts.taken - before.taken, counts.skipped - before.skipped) == (21, 1)


def has_fused_kernel_on_cuda(kind):
    """Not all releases of torch have that of Adagrad."""
    weight = nn.Parameter(torch.ones(1, device="cuda"))
    weight.grad = torch.ones_like(weight)
    try:
        kind([weight], lr=0.1, fused=True).step()
    except RuntimeError:
        return False
    return True


LOOKED_AT = 10
"""Forwards until O2 looks no more for what was written into half weights unseen."""


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", FUSED)
def test_cuda_itself_sees_no_wait(kind, level):
    """CUDA's own check raises at the first one; the count of skips arrives all the same."""
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    if not has_fused_kernel_on_cuda(kind):
        pytest.skip("not fused on CUDA in this torch")
    model = two_layers().cuda()
    optimizer = kind(model.parameters(), lr=0.01, fused=True)
    settings = {"max_consecutive_skips": 8, "init_scale": 256.0, "verbosity": 0}
    ampatch.initialize(model, optimizer, opt_level=level, **settings)
    healthy = torch.randn(3, 4, device="cuda")
    faulty = torch.full_like(healthy, math.nan)

    for _ in range(LOOKED_AT):
        training_step(model, optimizer, healthy)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in (healthy, faulty, healthy, *[faulty] * 6, healthy):
            training_step(model, optimizer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ampatch.step_counts(optimizer) == (LOOKED_AT + 3, 7, 0)


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
        whole_step(model(torch.tensor([1, 2]), factor), optimizer)
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
    whole_step((model(torch.ones(1, 2)) + alone).sum() * math.nan, optimizer)
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
