"""Parameters that several optimizers share, and what scripts do inside a block.

With a loss scale the half dtype would change nothing but roundings.
"""

import math

import pytest
import torch
from drivers import INIT_SCALE, SGD, Ampatch
from situations import batches, mlp, mse
from small_training import grads, same

import ampatch

GIVEN = pytest.mark.parametrize("indices", [[0, 1], [1, 0], [0], [1]])


def start(level, *layers, loss_scale="dynamic", **settings):
    """An optimizer of the model, and one more of each of these layers."""
    amp, model = Ampatch(level, torch.float16), mlp()
    optimizers = [SGD(part.parameters()) for part in (model, *(model[n] for n in layers))]
    amp.start(model, optimizers, loss_scale=loss_scale, **settings)
    return amp, model, optimizers


def loss_of(model, seed=1):
    [(x, y)] = batches(1, seed)
    return mse(model(x), y)


def copies(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def step_all(optimizers):
    """Which steps were skipped."""
    for optimizer in optimizers:
        optimizer.step()
    return [ampatch.step_was_skipped(optimizer) for optimizer in optimizers]


@pytest.mark.parametrize(
    "where, skipped", [(0, [True, False, True, False]), (2, [True, True, False, True])]
)
def test_an_overflow_concerns_all_holders_of_its_parameter_and_no_others(opt_level, where, skipped):
    """The first optimizer has all, the others share a layer or the other with it."""
    amp, model, optimizers = start(opt_level, 2, 0, 2, num_losses=2)
    with amp.scaled(loss_of(model), optimizers[0], loss_id=1) as scaled:
        scaled.backward()
        model[where].bias.grad.fill_(math.nan)
    before = copies(model.state_dict().values())
    assert step_all(optimizers) == skipped
    assert [ampatch.loss_scale(number) for number in (0, 1)] == [INIT_SCALE, INIT_SCALE / 2]
    after = list(model.state_dict().values())
    assert all(bool(value.isfinite().all()) for value in after)
    stood = [torch.equal(ours, other) for ours, other in zip(before, after, strict=True)]
    assert stood == [where == 0] * 2 + [where == 2] * 2


@GIVEN
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_clean_block_hides_no_earlier_overflow_of_a_shared_parameter(level, indices):
    amp, model, optimizers = start(level, 2)
    pair = [optimizers[index] for index in indices]
    amp.backward(loss_of(model) * math.inf, pair)
    amp.backward(loss_of(model), pair)
    assert step_all(optimizers) == [True, True]


@GIVEN
def test_a_failed_block_leaves_the_earlier_gradients_of_a_shared_parameter(opt_level, indices):
    amp, model, optimizers = start(opt_level, 2)
    pair = [optimizers[index] for index in indices]
    amp.backward(loss_of(model), pair)
    before = [copies(grads(optimizer)) for optimizer in optimizers]
    with pytest.raises(KeyboardInterrupt):
        with amp.scaled(loss_of(model, 2), pair) as scaled:
            scaled.backward()
            raise KeyboardInterrupt
    assert all(map(same, before, map(grads, optimizers)))


# Inside the block


def test_a_step_inside_the_block_is_refused(opt_level):
    amp, model, [optimizer] = start(opt_level)
    before = copies(model.state_dict().values())
    with pytest.raises(ampatch.AmpatchError, match="SGD.step.. inside the .*scale_loss block"):
        with amp.scaled(loss_of(model), optimizer) as scaled:
            scaled.backward()
            optimizer.step()
    assert same(before, list(model.state_dict().values()))
    amp.backward(loss_of(model), optimizer)
    assert step_all([optimizer]) == [False]


def test_clipping_inside_the_block_is_reported_and_spoils_nothing(opt_level, caplog):
    results = []
    for clips in (False, True):
        amp, model, [optimizer] = start(opt_level, loss_scale=64.0)
        with amp.scaled(loss_of(model), optimizer) as scaled:
            scaled.backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(ampatch.master_params(optimizer), 1e9)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        results.append(grads(optimizer))
        ampatch.deactivate()
    assert same(*results)
    assert "SGD: gradients are clipped inside its ampatch.scale_loss block" in caplog.text


@pytest.mark.parametrize("through", ["master_params", "model.parameters"])
def test_clipping_what_delay_unscale_left(opt_level, through):
    """The last block may have been delayed too: the norm is the unscaled gradients'."""
    amp, plain = Ampatch(opt_level, torch.float16), mlp(0)
    (model, other), (optimizer, second) = amp.start([mlp(0), mlp(1)], SGD, loss_scale="dynamic")
    delayed = {"delay_unscale": True}
    for seed in (1, 2):
        amp.backward(loss_of(model, seed), optimizer, delayed)
        loss_of(plain, seed).backward()
    amp.backward(loss_of(other), second, delayed)
    waiting = copies(grads(second))
    params = ampatch.master_params(optimizer) if through == "master_params" else model.parameters()
    norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    assert norm.item() == pytest.approx(expected.item(), rel=0.02)
    for grad, reference in zip(grads(optimizer), plain.parameters(), strict=True):
        assert torch.allclose(grad.float(), reference.grad, atol=0.02)
    assert same(waiting, grads(second)), "another optimizer's still wait"
