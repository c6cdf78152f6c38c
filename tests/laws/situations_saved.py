"""Situations: state dicts, checkpoints and copies of a model with its optimizer."""

import copy
import io
import pickle

import torch
from situations import batches, look, mlp, mse, situation, trained


@situation("O1 O2")
def state_dicts_that_are_kept(amp):
    """`state_dict` aliases the weights, as PyTorch's does: writes into it (Polyak averaging) reach
    the next forward, and one from the start shows later steps."""
    model, optimizer = amp.start(mlp())
    kept = model.state_dict()
    target = {key: value.clone() for key, value in kept.items()}
    for x, y in batches(4):
        for key, value in model.state_dict().items():
            value.copy_(0.5 * value + 0.5 * target[key])
        look(amp, model, x)
        amp.step(mse(model(x), y), optimizer)
        amp.record(*kept.values())
        kept["0.weight"].mul_(0.5)
        look(amp, model, x)


def through_a_file(pair):
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


THROUGH = {
    "deepcopied": copy.deepcopy,
    "saved": through_a_file,
    "pickled_optimizer_first": lambda pair: pickle.loads(pickle.dumps(pair[::-1]))[::-1],
}


@situation("O1 O2", cases=THROUGH, changes_weights=False)
def a_pair_trains(amp, case):
    """The copy is plain FP32; it goes on from there, and the first stays where it is."""
    pair = trained(amp, count=2)
    model, optimizer = amp.pair(*pair) if amp.by_hand else case(pair)
    with amp.no_casts():
        for x, y in batches(3):
            optimizer.zero_grad()
            amp.plain_backward(mse(model(x), y))
            optimizer.step()
    amp.record(*model.parameters())
