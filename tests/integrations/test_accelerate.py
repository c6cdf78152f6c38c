"""accelerate's `Accelerator` under an opt level: what a script asks of it."""

import gc
import types
import weakref

import pytest
import runs_with_accelerate as runs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, GradScalerKwargs
from small_training import pass_back
from torch import nn

import ampatch
from ampatch.integrations.accelerate import AmpatchAccelerator

HALF_LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


@pytest.fixture(autouse=True)
def forget_states():
    """Accelerate keeps what the first `Accelerator` was told, for the process."""
    runs.forget_states()
    yield
    runs.forget_states()


def make(level="O2", **arguments):
    return AmpatchAccelerator(level, cpu=True, **{"verbosity": 0, **arguments})


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(accelerator, model, optimizer, steps=4, poison=()):
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        inputs = torch.randn(8, 8, generator=generator)
        loss = F.cross_entropy(model(inputs), torch.randint(0, 3, (8,), generator=generator))
        losses.append(loss.item())
        accelerator.backward(loss * float("inf") if step in poison else loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


# Arguments


def test_mixed_precision_beside_it_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"mixed_precision='bf16' is set by an argument"):
        make(mixed_precision="bf16")
    assert make(mixed_precision="no").mixed_precision == "no"
    runs.forget_states()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match="'fp16' is set by ACCELERATE_MIXED_PRECISION"):
        make()
    make(mixed_precision="no")
    runs.forget_states()
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(ValueError, match="'bf16' is set by an earlier Accelerator"):
        make()


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"level": "O7"}, ValueError, "unknown opt level 'O7'"),
        ({"loss_scal": 2.0}, TypeError, 'AmpatchAccelerator.*loss_scal.*mean "loss_scale"'),
        ({"overrides": {"*": "flot"}}, ValueError, "overrides"),
        ({"kwargs_handlers": [GradScalerKwargs()]}, ValueError, "settings by name: init_scale"),
    ],
)
def test_wrong_arguments_are_refused_at_once(wrong, error, message):
    with pytest.raises(error, match=message):
        make(**wrong)


# Models and optimizers


@pytest.mark.parametrize("order", ["optimizer first", "one by one", "apart"])
def test_the_order_of_prepare_does_not_matter(order):
    """The oracle is `initialize` and `scale_loss` by hand."""
    model, optimizer = parts()
    ampatch.initialize(model, optimizer, opt_level="O2", dtype="bfloat16", verbosity=0)
    by_hand = types.SimpleNamespace(backward=lambda loss: pass_back(loss, optimizer))
    expected = train(by_hand, model, optimizer)
    ampatch.deactivate()
    accelerator, (model, optimizer) = make(dtype="bfloat16"), parts()
    before = [parameter.detach().clone() for parameter in model.eval().parameters()]
    if order == "optimizer first":
        optimizer, model = accelerator.prepare(optimizer, model)
    elif order == "one by one":
        model = accelerator.prepare(model)
        with torch.no_grad():
            model(torch.ones(8, 8))
        optimizer = accelerator.prepare(optimizer)
    else:
        optimizer = accelerator.prepare_optimizer(optimizer)
        model = accelerator.prepare_model(model)
    assert all(map(torch.equal, ampatch.master_params(optimizer), before))
    assert train(accelerator, model.train(), optimizer) == expected


@HALF_LEVELS
def test_two_models_prepared_one_after_the_other_share_a_scale(level):
    """An overflow that reached one skips its step alone."""
    accelerator = make(level, init_scale=256.0)
    (first, first_optimizer), (second, second_optimizer) = parts(), parts()
    first, first_optimizer = accelerator.prepare(first, first_optimizer)
    second, second_optimizer = accelerator.prepare(second, second_optimizer)
    assert list(ampatch.state_dict()) == ["loss_scaler0"]
    train(accelerator, first, first_optimizer, poison={3})
    train(accelerator, second, second_optimizer)
    assert ampatch.loss_scale() == 128.0
    assert first_optimizer.step_was_skipped and not second_optimizer.step_was_skipped
    assert accelerator.optimizer_step_was_skipped


@HALF_LEVELS
def test_a_scheduler_waits_while_steps_are_skipped_and_clipping_sees_true_gradients(level):
    accelerator = make(level, init_scale=8.0)
    model, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for poison, rate in ((), 0.05), ({0}, 0.05), ((), 0.025):
        train(accelerator, model, optimizer, 1, poison)
        assert optimizer.step_was_skipped is bool(poison)
        scheduler.step()
        assert scheduler.get_last_lr() == [rate]
    outputs = model(torch.randn(8, 8))
    assert outputs.dtype is torch.float32  # as accelerate's own are
    accelerator.backward(outputs.sum() * 100)
    accelerator.clip_grad_value_(model.parameters(), 0.5)
    assert max(p.grad.abs().max() for p in ampatch.master_params(optimizer)) == 0.5


def test_free_memory_lets_go_and_prepare_begins_anew():
    accelerator = make()
    model, optimizer = accelerator.prepare(*parts())
    train(accelerator, model, optimizer)
    held = weakref.ref(model)
    model, optimizer = accelerator.free_memory(model, optimizer)
    gc.collect()
    assert held() is None
    model, optimizer = accelerator.prepare(*parts())
    train(accelerator, model, optimizer)
    accelerator.free_memory()
    again, same = accelerator.prepare(model, optimizer)
    assert again is model and same is optimizer
    train(accelerator, model, optimizer)


# The training loop


def test_autocast_switches_casts_off_only_where_it_is_told_to():
    accelerator = make("O1", patch_scope="process")
    accelerator.prepare(parts()[0])
    weight = torch.randn(4, 4)
    with accelerator.autocast():
        assert (weight @ weight).dtype is torch.float16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert (weight @ weight).dtype is torch.float32


# Dynamo's own, where it cannot trace; what other tests have compiled before decides where that is.
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(("way", "level"), [("dynamo_backend", "O1"), ("compiled before", "O2")])
def test_torch_compile(way, level):
    torch.compiler.reset()
    accelerator = make(level, dtype="bfloat16")
    expected = train(accelerator, *accelerator.prepare(*parts()))
    ampatch.deactivate()
    runs.forget_states()
    more = {"dynamo_backend": "eager"} if way == "dynamo_backend" else {}
    accelerator, (model, optimizer) = make(level, dtype="bfloat16", **more), parts()
    if not more:
        model = torch.compile(model, backend="eager")
    assert train(accelerator, *accelerator.prepare(model, optimizer)) == expected


# Checkpoints


def test_a_checkpoint_has_the_scale_of_this_accelerator_alone(tmp_path):
    """A model of an earlier training may still be there, in a notebook."""
    earlier = ampatch.initialize(parts()[0], opt_level="O1", init_scale=8.0, verbosity=0)
    accelerator = make(init_scale=256.0)
    model, optimizer = accelerator.prepare(*parts())
    later = ampatch.initialize(parts()[0], opt_level="O1", init_scale=4.0, verbosity=0)
    train(accelerator, model, optimizer, poison={1})
    accelerator.save_state(tmp_path)
    assert list(torch.load(tmp_path / "ampatch.pt")) == ["loss_scaler0"]
    train(accelerator, model, optimizer, poison={1})
    accelerator.load_state(tmp_path)
    assert ampatch.state_dict(of=model)["loss_scaler0"] == {"loss_scale": 128.0, "unskipped": 2}
    assert ampatch.state_dict(of=earlier)["loss_scaler0"]["loss_scale"] == 8.0
    assert ampatch.state_dict(of=later)["loss_scaler0"]["loss_scale"] == 4.0


def test_checkpoints_of_accelerates_own(tmp_path, caplog):
    """They load into ours and ours into them; the scale of a GradScaler is taken over."""
    plain = Accelerator(cpu=True)
    model, optimizer = plain.prepare(*parts())
    train(plain, model, optimizer)
    plain.save_state(tmp_path)
    runs.forget_states()
    accelerator = make(verbosity=1)
    _, optimizer = accelerator.prepare(*parts())
    accelerator.load_state(tmp_path)
    assert "this checkpoint has no loss scale (ampatch.pt)" in caplog.text
    assert torch.equal(next(ampatch.master_params(optimizer)), model[0].weight)
    torch.save(torch.amp.GradScaler("cpu", init_scale=64.0).state_dict(), tmp_path / "scaler.pt")
    accelerator.load_state(tmp_path)
    assert ampatch.loss_scale() == 64.0
    accelerator.save_state(tmp_path)
    plain.load_state(tmp_path)


# Two ranks


def syncing_late(rank, level):
    """Two forwards under `no_sync`; the second backward pass averages both."""
    runs.forget_states()
    runs.name_rank()
    accelerator = Accelerator(cpu=True) if level is None else make(level, dtype="bfloat16")
    model, optimizer = accelerator.prepare(*parts())
    generator = torch.Generator().manual_seed(rank)
    with accelerator.no_sync(model):
        losses = [model(torch.randn(8, 8, generator=generator)).square().mean() for _ in range(2)]
    accelerator.backward(losses[0])
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(losses[1])
    optimizer.step()
    return accelerator.get_state_dict(model)["3.weight"].detach().clone()


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_trigger_sync_in_backward_averages_what_waited(ranks):
    expected, _ = ranks(syncing_late, None)
    for level in ("O1", "O2"):
        first, second = ranks(syncing_late, level)
        assert torch.equal(first, second)
        torch.testing.assert_close(first, expected, atol=4e-3, rtol=0)
