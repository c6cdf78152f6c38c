"""O2 and O3: which weights, buffers and calls are half.  Copies of models at all levels: plain."""

import copy
import functools
import pickle

import pytest
import small_training
import torch
import torch.nn.functional as F
from operators import Operators
from small_training import Made, dtypes, managed, pass_back, same
from small_training import train_with_norms as train
from small_training import with_norms as build
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ampatch
from ampatch.models.running_statistics import RunningStatistics, norms_of

NORMS = {"1.weight", "1.bias", "1.running_mean", "1.running_var"}
FLOAT = {"offset"}  # buffers of the user's stay in FP32, as under autocast


def start(level, dtype=torch.float16, **settings):
    sgd = functools.partial(torch.optim.SGD, momentum=0.9)
    return managed(build(), level, dtype, sgd, **settings)


def dtypes_inside(model):
    """As the model's forward sees them."""
    seen = {}
    handle = model[0].register_forward_hook(lambda *call: seen.update(dtypes(model)))
    model(torch.randn(8, 3))
    handle.remove()
    return seen


@pytest.mark.parametrize("keep", [None, True, "True", False, "False"])
@pytest.mark.parametrize("level, copies", [("O2", True), ("O2", False), ("O3", False)])
def test_which_tensors_are_half(level, copies, keep, half):
    """Beside half copies norms are FP32 in any case: their kernels want one dtype."""
    settings = {} if copies or level == "O3" else {"master_weights": False}
    model, _ = start(level, half, keep_batchnorm_fp32=keep, **settings)
    stays = copies or keep in (True, "True") or (level == "O2" and keep is None)
    outside, inside = dtypes(model), dtypes_inside(model)
    for found in (outside, inside):
        assert found.pop("1.num_batches_tracked") is torch.int64
    for name, dtype in inside.items():
        is_float = name in FLOAT or (stays and name in NORMS)
        assert dtype is (torch.float32 if is_float else half), name
    assert set(outside.values()) == {torch.float32} if copies else outside == inside


def test_that_batchnorm_stays_float_is_said(caplog):
    caplog.set_level("INFO", "ampatch")
    ampatch.initialize(build(), opt_level="O2", keep_batchnorm_fp32=False)
    assert "keep_batchnorm_fp32=False has no effect" in caplog.text
    caplog.clear()
    ampatch.initialize(build(), opt_level="O2", keep_batchnorm_fp32=False, master_weights=False)
    assert "has no effect" not in caplog.text


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_of_a_half_model_with_fp32_buffers_only_mixed_calls_are_cast(level, half):
    """Angles that are made of FP32 buffers alone stay exact; what is half throughout stays half."""
    seen = {}

    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("places", torch.arange(4096.0)[:, None])
            self.register_buffer("frequencies", torch.logspace(0, -4, 8)[None])

        def forward(self, x):
            seen["angles"] = self.places @ self.frequencies
            seen["half"] = torch.softmax(self.layer(x), -1)
            return self.layer(x) @ seen["angles"][:8].cos()

    model = Rotary()
    ampatch.initialize(model, opt_level=level, dtype=half, verbosity=0)
    model(torch.ones(2, 8))
    assert torch.equal(seen["angles"], model.places @ model.frequencies)
    assert seen["angles"].dtype is torch.float32 and seen["half"].dtype is half


# Copies; averages and what copies train: situations of laws; files: tests/session/test_copies.py


def hooks_of(module):
    return {
        name: len(table)
        for name, table in vars(module).items()
        if "hook" in name and hasattr(table, "__len__")
    }


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "pickle, protocol 0": lambda model: pickle.loads(pickle.dumps(model, 0)),
    "AveragedModel": lambda model: AveragedModel(model).module,
    "unwrap": ampatch.unwrap,
    "in a list": lambda model: copy.deepcopy([model])[0],
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_are_plain_models_of_the_same_weights(opt_level, how):
    """In FP32, at O3 in half: what there is."""
    model, optimizer = start(opt_level)
    train(model, optimizer)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    copied = COPIES[how](model)
    assert type(copied) is nn.Sequential and copied is not model
    for plain, reference in zip(copied.modules(), build().modules(), strict=True):
        assert hooks_of(plain) == hooks_of(reference)
        assert set(vars(plain)) == set(vars(reference)) and type(plain.__dict__) is dict
    state = copied.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert dtypes(copied) == dtypes(model)
    assert (torch.float16 in set(dtypes(copied).values())) is (opt_level == "O3")
    own = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
    assert not own & {t.data_ptr() for t in copied.parameters()}
    ampatch.deactivate()
    x = torch.randn(4, 3)
    assert torch.equal(copied.float().eval()(x), model.eval()(x))


SETTINGS = {"init_scale": 64.0, "verbosity": 0, "dtype": torch.float16}
KINDS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05),
    "Adam fused": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-3, fused=True),
}


def network():
    """Two norms behind layers whose results overflow in half where the input is large."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    return Made(
        lambda self, x: self.head(F.relu(self.norm(self.conv(x)))),
        conv=nn.Conv2d(2, 4, 3),
        norm=nn.BatchNorm2d(4),
        head=head,
    )


def batch(number, factor=1.0):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 2, 6, 6, generator=generator) * factor


def start_with(level, kind="SGD", **settings):
    model = network()
    optimizer = KINDS[kind](model.parameters())
    ampatch.initialize(model, optimizer, opt_level=level, **SETTINGS, **settings)
    return model, optimizer


def backward(model, optimizer, number, factor=1.0):
    loss = model(batch(number, factor)).float().square().mean()
    pass_back(loss, optimizer)


def step(model, optimizer, *micros):
    """On micro-batches, each a number and perhaps a factor."""
    optimizer.zero_grad()
    for micro in micros:
        backward(model, optimizer, *micro)
    optimizer.step()


def statistics(model):
    """Mean and variance of the first norm, then of the second."""
    found = [value.clone() for name, value in model.named_buffers() if "running" in name]
    assert len(found) == 4
    return found


HUGE = 3e4


def is_hurt(model, number=9):
    """Without the repair: a copy's forward with the huge batch."""
    plain = copy.deepcopy(model).half().train()
    plain(batch(number, HUGE).half())
    return not all(value.isfinite().all() for value in statistics(plain))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("kind", KINDS)
def test_after_an_overflow_in_the_forward_evaluation_is_that_of_fp32(level, kind):
    """The runs beside it, in FP32 and at this level, have not seen the batch that overflows."""
    settings = {"loss_scale": "dynamic"} if level == "O3" else {}
    model, optimizer = start_with(level, kind, **settings)
    assert is_hurt(model)
    healthy, its = start_with(level, kind, **settings)
    plain = network()
    other = KINDS[kind](plain.parameters())
    for number in range(6):
        if number in (0, 3):  # in the very first step too
            before = statistics(model)
            step(model, optimizer, (9, HUGE))
            assert ampatch.step_was_skipped(optimizer)
            assert same(before, statistics(model)), number
        step(model, optimizer, (number,))
        assert not ampatch.step_was_skipped(optimizer)
        step(healthy, its, (number,))
        other.zero_grad()
        plain(batch(number)).square().mean().backward()
        other.step()
    assert ampatch.step_counts(optimizer).skipped == 2
    output, alike, expected = (net.eval()(batch(7)).float() for net in (model, healthy, plain))
    assert torch.equal(output, alike)
    torch.testing.assert_close(output, expected, atol=0.1, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_one_micro_batch_of_three(kind):
    """The others' forwards run with statistics that are inf; all goes back to before the first."""
    model, optimizer = start_with("O1", kind)
    step(model, optimizer, (1,))
    before = statistics(model)
    step(model, optimizer, (2,), (9, HUGE), (3,))
    assert all(value.isfinite().all() for value in statistics(model))
    assert (statistics(model)[1] == before[1]).any()  # of the channels


def test_statistics_that_stayed_finite_are_kept_as_torch_amp_keeps_them():
    model, optimizer = start_with("O1")
    before = statistics(model)
    small_training.step(model(batch(1)).float().sum() * float("inf"), optimizer)
    assert ampatch.step_was_skipped(optimizer)
    assert not torch.equal(statistics(model)[0], before[0])
    assert model.norm.num_batches_tracked == 1


def load(model):
    trained = network()
    for number in range(3):
        trained(batch(number) + 1.0)
    model.load_state_dict(trained.state_dict())


def load_a_part(model):
    model.norm.load_state_dict({name: value + 1 for name, value in model.norm.state_dict().items()})


def move(model):
    """`to(device)` gives a module other buffers."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.clone())


@pytest.mark.parametrize("change", [load, load_a_part, move])
def test_a_model_that_was_loaded_or_moved_since_the_last_step(change):
    model, optimizer = start_with("O1")
    change(model)
    before = statistics(model)
    step(model, optimizer, (9, HUGE))
    assert same(before, statistics(model))


def test_another_optimizers_step_meanwhile_notes_no_inf():
    models = [network(), network()]
    pair = [KINDS["SGD"](model.parameters()) for model in models]
    ampatch.initialize(models, pair, opt_level="O1", **SETTINGS)
    before = statistics(models[0])
    backward(models[0], pair[0], 9, HUGE)
    step(models[1], pair[1], (1,))
    pair[0].step()
    assert ampatch.step_was_skipped(pair[0]) and not ampatch.step_was_skipped(pair[1])
    assert same(before, statistics(models[0]))


def test_a_graph_from_before_a_fused_step_has_its_backward_after_it():
    """As the generator's in a GAN: torch compares the versions of buffers there."""
    model, optimizer = start_with("O1", "Adam fused")
    waiting = model(batch(1)).float().square().mean()
    step(model, optimizer, (2,))
    torch.autograd.grad(waiting, [model.norm.bias])


@pytest.mark.parametrize("skipped", [False, True, torch.zeros(())])
def test_operators_of_a_step_do_not_grow_with_the_norms(skipped):
    counts = []
    for norms in (1, 20):
        model = nn.Sequential(nn.Linear(4, 4), *(nn.BatchNorm1d(4) for _ in range(norms)))
        statistics = RunningStatistics(norms_of(model))
        with Operators() as operators:
            statistics.after_step(skipped)
        views = operators.seen.count(torch.ops.aten.detach.default)  # one of each
        counts.append(len(operators.seen) - views)
    assert counts[0] == counts[1]


def test_statistics_that_are_no_plain_tensors_any_more_are_left_alone():
    model, optimizer = start_with("O1")
    for norm in (model.norm, model.head[2]):
        for name in ("running_mean", "running_var"):
            value = getattr(norm, name)
            delattr(norm, name)
            setattr(norm, name, nn.Parameter(value, requires_grad=False))
    for number in range(3):
        step(model, optimizer, (number,))
    assert not ampatch.step_was_skipped(optimizer)
