"""Situations: state dicts, checkpoints and copies of a model with its optimizer."""

from __future__ import annotations

import copy
import io
import pickle

import torch
from situations import batches, mlp, mse, plain_loop, situation


@situation("O1 O2", letter="k")
def writes_into_the_state_dict(amp):
    """Polyak averaging in place: `state_dict` aliases the weights, as PyTorch's does."""
    model, optimizer = amp.start(mlp())
    target = {key: value.clone() for key, value in model.state_dict().items()}
    for x, y in batches(4):
        own = model.state_dict()
        for key, value in own.items():
            value.copy_(0.5 * value + 0.5 * target[key])
        with torch.no_grad():
            amp.record(model(x))
        amp.step(mse(model(x), y), optimizer)


@situation("O1 O2", letter="k")
def a_state_dict_kept_from_the_start_is_written(amp):
    model, optimizer = amp.start(mlp())
    own = model.state_dict()
    for x, y in batches(3):
        amp.step(mse(model(x), y), optimizer)
        own["0.weight"].mul_(0.5)
        with torch.no_grad():
            amp.record(model(x))


@situation("O1 O2", letter="k")
def a_state_dict_kept_shows_later_steps(amp):
    model, optimizer = amp.start(mlp())
    own = model.state_dict()
    for x, y in batches(3):
        amp.step(mse(model(x), y), optimizer)
        amp.record(own["0.weight"], own["2.bias"])


@situation()
def a_checkpoint_loaded_in_the_middle(amp):
    model, optimizer = amp.start(mlp())
    plain_loop(amp, model, optimizer, 2)
    model.load_state_dict(mlp(5).state_dict())
    plain_loop(amp, model, optimizer, 2)


@situation()
def rolled_back_to_the_best_weights(amp):
    model, optimizer = amp.start(mlp())
    plain_loop(amp, model, optimizer, 2)
    best = {key: value.clone() for key, value in model.state_dict().items()}
    plain_loop(amp, model, optimizer, 2)
    model.load_state_dict(best)
    plain_loop(amp, model, optimizer, 2)


@situation("O1 O2")
def saved_and_resumed(amp):
    model, optimizer = amp.start(mlp())
    plain_loop(amp, model, optimizer, 2)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again = amp.another()
    model, optimizer = again.start(mlp(7))
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    plain_loop(again, model, optimizer, 2, seed=3)


@situation("O1 O2", letter="p", changes_weights=False)
def a_deepcopied_pair_trains(amp):
    """The copy is plain FP32; it goes on from there, and the first stays where it is."""
    model, optimizer = amp.start(mlp())
    plain_loop(amp, model, optimizer, 2)
    first, second = _fp32_pair(amp, model, optimizer, copy.deepcopy)
    _train_plain(amp, first, second)


@situation("O1 O2", letter="p", changes_weights=False)
def a_saved_pair_trains(amp):
    def through_a_file(pair):
        file = io.BytesIO()
        torch.save(pair, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    model, optimizer = amp.start(mlp())
    plain_loop(amp, model, optimizer, 2)
    _train_plain(amp, *_fp32_pair(amp, model, optimizer, through_a_file))


@situation("O1 O2", letter="p", changes_weights=False)
def a_pickled_pair_trains_optimizer_first(amp):
    model, optimizer = amp.start(mlp())
    plain_loop(amp, model, optimizer, 2)
    _train_plain(
        amp,
        *_fp32_pair(
            amp,
            model,
            optimizer,
            lambda pair: pickle.loads(pickle.dumps(pair[::-1]))[::-1],
        ),
    )


def _fp32_pair(amp, model, optimizer, through):
    """A copy of the pair; by hand: a new FP32 pair with the same values and state."""
    return amp.pair(model, optimizer) if amp.by_hand else through((model, optimizer))


def _train_plain(amp, model, optimizer):
    with amp.no_casts():
        for x, y in batches(3):
            optimizer.zero_grad()
            loss = mse(model(x), y)
            amp.record(loss)
            loss.backward()
            optimizer.step()
    amp.record(*model.parameters())


@situation("O1 O2", letter="j")
def a_write_right_after_a_checkpoint_was_loaded(amp):
    model, optimizer = amp.start(mlp())
    model.load_state_dict(mlp(3).state_dict())
    model[0].weight.data.clamp_(-0.1, 0.1)
    amp.record(model.state_dict()["0.weight"])
    plain_loop(amp, model, optimizer)
