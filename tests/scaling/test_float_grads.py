"""O2: `.grad` of a weight is its FP32 gradient, for every idiom there is."""

from __future__ import annotations

import pytest
import torch
from small_training import data, seeded
from torch import nn

import ampatch

BF16 = torch.bfloat16
HALVES = pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)


def start(dtype=BF16, lr=0.1, **settings):
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    settings = {"init_scale": 1024.0, **settings}
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=dtype, verbosity=0, **settings)
    return model, optimizer


def backward(model, optimizer, seed=1, scaled=True, factor=1.0):
    inputs, targets = data(seed)
    loss = nn.functional.mse_loss(model(inputs), targets) * factor
    if not scaled:
        loss.backward()
        return
    with ampatch.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


def plain_grads(*seeds):
    model = seeded()
    for seed in seeds:
        inputs, targets = data(seed)
        nn.functional.mse_loss(model(inputs), targets).backward()
    return [p.grad for p in model.parameters()]


def close(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.02)


def set_none(model):
    for p in model.parameters():
        p.grad = None


def delete(model):
    for p in model.parameters():
        del p.grad


def to_zero(model):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()


def to_zero_data(model):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.zero_()


def detached(model):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.detach_()
            p.grad.zero_()


ZEROINGS = [set_none, delete, to_zero, to_zero_data, detached]


@HALVES
@pytest.mark.parametrize("scaled", [True, False], ids=["scale_loss", "plain"])
@pytest.mark.parametrize("zero", ZEROINGS)
def test_gradients_zeroed_by_hand_do_not_add_up(zero, scaled, dtype):
    model, optimizer = start(dtype)
    for seed in (1, 2, 3):
        zero(model)
        backward(model, optimizer, seed, scaled)
        close([p.grad for p in model.parameters()], plain_grads(seed))
        close([p.grad for p in ampatch.master_params(optimizer)], plain_grads(seed))


@HALVES
@pytest.mark.parametrize("scaled", [True, False], ids=["scale_loss", "plain"])
def test_between_backward_and_step_the_gradient_is_there_in_float32(scaled, dtype):
    """Norm logging sees it, unscaled, whole, and of several passes; small ones do not underflow."""
    model, optimizer = start(dtype)
    for seed in (1, 2):
        backward(model, optimizer, seed, scaled)
    grads = [p.grad for p in model.parameters()]
    assert {grad.dtype for grad in grads} == {torch.float32}
    close(grads, plain_grads(1, 2))
    params = ampatch.master_params(optimizer)
    assert all(p.grad is grad for p, grad in zip(params, grads, strict=True))


def test_small_gradients_are_seen_whole():
    model, optimizer = start(torch.float16, init_scale=2.0**16)
    backward(model, optimizer, factor=2.0**-24)
    for grad, whole in zip([p.grad for p in model.parameters()], plain_grads(1), strict=True):
        torch.testing.assert_close(grad * 2.0**24, whole, rtol=0.05, atol=0.05)


GIVEN = {
    "half": lambda p: torch.full_like(p, 0.5),
    "float32": lambda p: torch.full_like(p, 0.5, dtype=torch.float32),
}


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("kind", GIVEN)
def test_gradients_written_by_hand_count(kind, existing):
    """PCGrad: what is assigned is what the step uses."""
    model, optimizer = start()
    if existing:
        backward(model, optimizer)
    before = [p.detach().clone() for p in ampatch.master_params(optimizer)]
    for p in model.parameters():
        p.grad = GIVEN[kind](p)
    optimizer.step()
    for old, new in zip(before, ampatch.master_params(optimizer), strict=True):
        assert torch.equal(new, old - 0.1 * 0.5)


IN_PLACE = {
    "mul_": lambda p: p.grad.mul_(0.5),
    "data.mul_": lambda p: p.grad.data.mul_(0.5),
    "numpy": lambda p: p.grad.numpy().__imul__(0.5),
    "assigned": lambda p: setattr(p, "grad", p.grad * 0.5),
}


@pytest.mark.parametrize("change", IN_PLACE)
def test_gradients_changed_in_place_count(change):
    model, optimizer = start()
    backward(model, optimizer)
    wanted = [p.grad.clone() * 0.5 for p in model.parameters()]
    for p in model.parameters():
        IN_PLACE[change](p)
    found = [p.grad for p in ampatch.master_params(optimizer)]
    assert all(map(torch.equal, found, wanted))


def test_inside_a_block_it_is_what_autograd_left():
    model, optimizer = start(torch.float16)
    backward(model, optimizer)
    inputs, targets = data(2)
    loss = nn.functional.mse_loss(model(inputs), targets)
    with ampatch.scale_loss(loss, optimizer) as scaled:
        assert all(p.grad is None for p in model.parameters())
        scaled.backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    close([p.grad for p in model.parameters()], plain_grads(1, 2))


@pytest.mark.parametrize("after", [False, True], ids=["before backward", "after backward"])
@pytest.mark.parametrize("to_none", [True, False])
def test_zeroed_inside_a_block_all_is_gone(to_none, after):
    """As in FP32 training: what was there before the block, too."""
    model, optimizer = start(torch.float16)
    backward(model, optimizer)
    inputs, targets = data(2)
    loss = nn.functional.mse_loss(model(inputs), targets)
    with ampatch.scale_loss(loss, optimizer) as scaled:
        if not after:
            model.zero_grad(to_none)
        scaled.backward()
        if after:
            model.zero_grad(to_none)
    grads = [p.grad for p in model.parameters()]
    if after:
        assert not any(grad is not None and grad.any() for grad in grads)
    else:
        close(grads, plain_grads(2))


def test_hooks_on_accumulated_gradients_see_what_optimizers_in_them_need():
    model, optimizer = start(torch.bfloat16)
    seen = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
    backward(model, optimizer, scaled=False)
    assert seen == [torch.float32] * 4
    close([p.grad for p in model.parameters()], plain_grads(1))


@pytest.mark.parametrize("scaled", [True, False], ids=["scale_loss", "plain"])
def test_512_small_gradients_add_up_in_float32(scaled):
    """In bfloat16 the sum would stop at half of it."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=BF16, verbosity=0)
    for _ in range(512):
        loss = model(torch.full((1, 1), 2.0**-9)).sum()
        if scaled:
            with ampatch.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
    assert model.weight.grad.item() == 1.0
    before = next(ampatch.master_params(optimizer)).item()
    optimizer.step()
    assert next(ampatch.master_params(optimizer)).item() == pytest.approx(before - 1.0)


def test_a_frozen_weight_has_no_gradient_and_one_thawed_has():
    model, optimizer = start()
    model[0].requires_grad_(False)
    backward(model, optimizer)
    assert model[0].weight.grad is None and model[2].weight.grad.dtype is torch.float32
    model[0].requires_grad_(True)
    optimizer.zero_grad()
    backward(model, optimizer)
    close([p.grad for p in model.parameters()], plain_grads(1))


def test_sparse_gradients():
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=BF16, verbosity=0)
    model(torch.tensor([1, 3])).sum().backward()
    assert model.weight.grad.is_sparse and model.weight.grad.dtype is torch.float32
    model.weight.grad = None
    model(torch.tensor([3])).sum().backward()
    before = next(ampatch.master_params(optimizer)).detach().clone()
    optimizer.step()
    moved = (before - next(ampatch.master_params(optimizer))).sum(1)
    torch.testing.assert_close(moved, torch.tensor([0.0, 0.0, 0.0, 2.0, 0.0]))


def test_a_second_initialize_keeps_them_and_so_does_one_that_fails():
    model, optimizer = start()
    backward(model, optimizer)
    held = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(ValueError):
        ampatch.initialize(model, [optimizer, torch.optim.SGD(seeded().parameters())])
    assert all(map(torch.equal, [p.grad for p in model.parameters()], held))
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=BF16, verbosity=0)
    assert all(map(torch.equal, [p.grad for p in model.parameters()], held))


def test_an_overflow_is_forgotten_with_gradients_set_to_none():
    model, optimizer = start(torch.float16)
    backward(model, optimizer, factor=float("inf"))
    set_none(model)
    backward(model, optimizer)
    optimizer.step()
    assert not ampatch.step_was_skipped(optimizer)


def test_under_the_apex_package():
    from ampatch.compat import apex

    apex.install()
    try:
        from apex import amp

        model, optimizer = seeded(), None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        for seed in (1, 2):
            set_none(model)
            inputs, targets = data(seed)
            loss = nn.functional.mse_loss(model(inputs), targets)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        close([p.grad for p in amp.master_params(optimizer)], plain_grads(2))
    finally:
        ampatch.deactivate()
        apex.uninstall()


def test_a_look_in_inference_mode_spoils_nothing():
    model, optimizer = start()
    for seed in (1, 2):
        backward(model, optimizer, seed, scaled=False)
        with torch.inference_mode():
            model(data()[0])
            assert model[0].weight.grad.isfinite().all()
    close([p.grad for p in model.parameters()], plain_grads(1, 2))
    optimizer.step()


def by_groups(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("scaled_before", [False, True])
def test_a_plain_pass_shows_in_the_groups_when_it_ends(scaled_before):
    """Clipping, all-reducing and zeroing by hand go over `param_groups`."""
    model, optimizer = start(BF16)
    if scaled_before:
        backward(model, optimizer)
        optimizer.zero_grad()
        backward(model, optimizer, scaled=False)
        optimizer.step()
        optimizer.zero_grad()
    else:
        backward(model, optimizer, scaled=False)
        close([p.grad for p in by_groups(optimizer)], plain_grads(1))
        for p in by_groups(optimizer):
            p.grad = None
    before = [p.detach().clone() for p in by_groups(optimizer)]
    optimizer.step()
    assert all(map(torch.equal, before, by_groups(optimizer)))
    backward(model, optimizer, scaled=False)
    assert all(p.grad is not None for p in by_groups(optimizer))


@pytest.mark.parametrize("forwards_first", [False, True])
def test_passes_without_a_forward_between_them_add_up_in_float32(forwards_first):
    model, _optimizer = start(BF16)
    inputs, _ = data(1)
    if forwards_first:
        for loss in [model(inputs).mean() / 512 for _ in range(512)]:
            loss.backward()
    else:
        loss = model(inputs).mean() / 512
        for _ in range(512):
            loss.backward(retain_graph=True)
    whole, _other = start(BF16)
    whole(inputs).mean().backward()
    close([p.grad for p in model.parameters()], [p.grad for p in whole.parameters()])
