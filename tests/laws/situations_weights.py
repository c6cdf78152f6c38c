"""Situations: weights that are written, swapped, shared, frozen, averaged, copied and loaded."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial

import torch
from drivers import SGD
from situations import Block, batches, mlp, mse, plain_loop, situation
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

PLAIN = partial(torch.optim.SGD, lr=0.1)


def write_between_steps(amp, write, count=3, make=SGD):
    """A step, a write, a forward, and so on."""
    model, optimizer = amp.start(mlp(), make)
    for x, y in batches(count):
        amp.step(mse(model(x), y), optimizer)
        write(model)
        with torch.no_grad():
            amp.record(model(x))


@situation(letter="j")
def a_mask_by_data_mul(amp):
    """Pruning by hand; a master that goes on unmasked grows back at once."""

    def write(model):
        model[0].weight.data.mul_(torch.eye(8)[:, :4])

    write_between_steps(amp, write)


@situation(letter="j")
def clamp_by_data_after_each_step(amp):
    """WGAN's weight clipping."""

    def write(model):
        for p in model.parameters():
            p.data.clamp_(-0.1, 0.1)

    write_between_steps(amp, write)


@situation(letter="j")
def data_is_replaced(amp):
    def write(model):
        for p in model.parameters():
            p.data = p.data * 0.5

    write_between_steps(amp, write)


@situation(letter="j")
def vector_to_parameters_and_back(amp):
    def write(model):
        vector_to_parameters(parameters_to_vector(model.parameters()) * 0.5, model.parameters())

    write_between_steps(amp, write)


@situation(letter="j")
def a_write_before_the_first_step(amp):
    model, optimizer = amp.start(mlp())
    for p in model.parameters():
        p.data.mul_(0.5)
    plain_loop(amp, model, optimizer)


@situation(letter="j")
def a_write_between_forward_and_step(amp):
    model, optimizer = amp.start(mlp())
    for x, y in batches(3):
        optimizer.zero_grad()
        amp.backward(mse(model(x), y), optimizer)
        model[0].weight.data[0].zero_()
        optimizer.step()
        amp.record(model.state_dict()["0.weight"])


@situation(letter="j")
def a_write_through_a_flat_view(amp):
    """As collectives write: into memory, without a version."""

    def write(model):
        flat = model[2].weight.detach().view(-1)
        flat.data[::3] = 0.25

    write_between_steps(amp, write)


@situation(letter="j")
def a_write_seen_by_the_state_dict(amp):
    model, optimizer = amp.start(mlp())
    plain_loop(amp, model, optimizer, 1)
    model[0].bias.data.fill_(0.3)
    amp.record(model.state_dict()["0.bias"], copy.deepcopy(model).state_dict()["0.bias"])
    plain_loop(amp, model, optimizer, 1)


@situation()
def writes_under_no_grad(amp):
    @torch.no_grad()
    def write(model):
        nn.init.constant_(model[0].bias, 0.2)
        model[2].weight.copy_(model[2].weight * 0.5)
        model[2].bias.add_(1)

    write_between_steps(amp, write)


@situation(letter="j")
def spectral_clipping_by_svd(amp):
    def write(model):
        u, s, v = torch.linalg.svd(model[0].weight.data.float(), full_matrices=False)
        with amp.no_casts():
            model[0].weight.data.copy_(u @ torch.diag(s.clamp(max=0.4)) @ v)

    write_between_steps(amp, write)


def swapped(model, values):
    """Put other values into the weights by `.data`; returns what was there."""
    was = [p.data.clone() for p in model.parameters()]
    for p, value in zip(model.parameters(), values):
        p.data.copy_(value)
    return was


@situation(letter="b")
def weights_swapped_for_an_evaluation(amp):
    """EMA weights put in for a validation and taken out again: the weights are what they were."""
    model, optimizer = amp.start(mlp())
    mean = [p.data.float().clone() for p in model.parameters()]
    for x, y in batches(4):
        amp.step(mse(model(x), y), optimizer)
        for value, p in zip(mean, model.parameters()):
            value.lerp_(p.data.float(), 0.1)
        was = swapped(model, mean)
        with torch.no_grad():
            amp.record(model(x))
        swapped(model, was)


@situation("O1", letter="b")
def weights_swapped_while_a_graph_waits(amp):
    """Today's gradients are off up to 10 times."""
    model, optimizer = amp.start(mlp())
    for x, y in batches(4):
        optimizer.zero_grad()
        loss = mse(model(x), y)
        was = swapped(model, [p.data * 5 for p in model.parameters()])
        with torch.no_grad():
            amp.record(model(x))
        swapped(model, was)
        amp.backward(loss, optimizer)
        optimizer.step()


@situation("O1", letter="b")
def sam_by_data_around_a_waiting_graph(amp):
    model, optimizer = amp.start(mlp())
    for x, y in batches(4):
        optimizer.zero_grad()
        loss = mse(model(x), y)
        was = [p.data.clone() for p in model.parameters()]
        for p in model.parameters():
            p.data.add_(torch.sign(p.data), alpha=0.5)
        with torch.no_grad():
            model(-x)
        other = mse(model(x), y)
        swapped(model, was)
        amp.backward(loss + other, optimizer)
        optimizer.step()


@situation()
def sam_by_hand(amp):
    """Ascend by the gradient, take the gradient there, go back, step."""
    model, optimizer = amp.start(mlp(), PLAIN)
    for x, y in batches(4):
        amp_params = list(optimizer.param_groups[0]["params"])
        optimizer.zero_grad()
        amp.backward(mse(model(x), y), optimizer)
        with torch.no_grad():
            was = [p.clone() for p in amp_params]
            for p in amp_params:
                p.add_(p.grad, alpha=0.3)
        optimizer.zero_grad()
        amp.backward(mse(model(x), y), optimizer)
        with torch.no_grad():
            for p, value in zip(amp_params, was):
                p.copy_(value)
        optimizer.step()


class NonNegative(nn.Module):
    """Clamps its own weight in its forward, after an earlier use of it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = torch.tanh(self.layer(x))
        self.layer.weight.data.clamp_(min=0)
        return self.head(torch.tanh(self.layer(x)))


@situation("O1", letter="e", against="FP32", within=2e-2)
def clamp_by_data_within_the_forward(amp):
    """Autocast's own cache is stale here: 0.16 away from FP32."""
    model, optimizer = amp.start(NonNegative())
    for x, _ in batches(4):
        with torch.no_grad():
            amp.record(model(x))
    plain_loop(amp, model, optimizer)


@situation(letter="e")
def clamp_by_data_before_the_use_in_a_forward(amp):
    class First(Block):
        def forward(self, x):
            self.first.weight.data.clamp_(min=0)
            return super().forward(x)

    model, optimizer = amp.start(First())
    plain_loop(amp, model, optimizer, 4)


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


@situation("O1 O2", letter="l")
def writes_to_masters_outside_of_step(amp):
    model, optimizer = amp.start(mlp())
    for x, y in batches(4):
        amp.step(mse(model(x), y), optimizer)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.mul_(0.9)
            amp.record(model(x))
        for p in optimizer.param_groups[0]["params"]:
            p.data.add_(0.01)
        with torch.no_grad():
            amp.record(model(x))


@situation("O1 O2", letter="l")
def a_write_to_a_master_before_the_first_step(amp):
    model, optimizer = amp.start(mlp())
    for p in optimizer.param_groups[0]["params"]:
        p.data.mul_(0.5)
    plain_loop(amp, model, optimizer)


@situation("O1 O2", letter="l")
def schedule_free_modes(amp):
    """`eval()` and `train()` of the optimizer move its parameters between two points."""

    class ScheduleFree(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)

        @torch.no_grad()
        def eval(self):
            for p in self.param_groups[0]["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, 0.5)

        @torch.no_grad()
        def train(self):
            for p in self.param_groups[0]["params"]:
                p.lerp_(self.state[p]["z"], -1.0)

    model, optimizer = amp.start(mlp(), ScheduleFree)
    for x, y in batches(4):
        amp.step(mse(model(x), y), optimizer)
        optimizer.eval()
        with torch.no_grad():
            amp.record(model(x))
        optimizer.train()


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


@situation()
def freezing_and_unfreezing(amp):
    model, optimizer = amp.start(mlp())
    for number, (x, y) in enumerate(batches(6)):
        model[0].requires_grad_(number not in (2, 3))
        amp.step(mse(model(x), y), optimizer)


@situation()
def frozen_from_the_start_and_unfrozen(amp):
    """What is frozen has no master; from when it trains it has."""
    net = mlp()
    net[0].requires_grad_(False)
    model, optimizer = amp.start(net)
    plain_loop(amp, model, optimizer, 2)
    model[0].requires_grad_(True)
    plain_loop(amp, model, optimizer, 2)


@situation()
def a_group_added_later(amp):
    """A frozen body joins with its own learning rate."""
    net = mlp()
    net[0].requires_grad_(False)
    model, optimizer = amp.start(net, lambda params: SGD([p for p in params if p.requires_grad]))
    plain_loop(amp, model, optimizer, 2)
    model[0].requires_grad_(True)
    amp.add_group(optimizer, list(model[0].parameters()), lr=0.01)
    plain_loop(amp, model, optimizer, 3)


@situation()
def tied_weights(amp):
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    net[2].weight = net[0].weight
    model, optimizer = amp.start(net)
    plain_loop(amp, model, optimizer, 4)


@situation("O1 O2", within=1e-2, against="FP32", halves="fp16")
def weight_norm(amp):
    """Against FP32: a weight that stood still would be 0.2 away."""
    net = mlp()
    parametrizations.weight_norm(net[0])
    model, optimizer = amp.start(net)
    plain_loop(amp, model, optimizer, 4)


@situation("O1")
def weight_norm_exactly(amp):
    net = mlp()
    parametrizations.weight_norm(net[2])
    model, optimizer = amp.start(net)
    plain_loop(amp, model, optimizer, 4)


@situation("O1", within=1e-2, against="FP32", halves="fp16")
def spectral_norm(amp):
    net = mlp()
    parametrizations.spectral_norm(net[0])
    model, optimizer = amp.start(net)
    plain_loop(amp, model, optimizer, 4)


@situation("O1 O2")
def pruning(amp):
    net = mlp()
    model, optimizer = amp.start(net)
    plain_loop(amp, model, optimizer, 2)
    mask = (torch.arange(32).view(8, 4) % 3 > 0).float()
    prune.custom_from_mask(model[0], "weight", mask.to(model[0].weight.dtype))
    plain_loop(amp, model, optimizer, 3)


@situation()
def an_ema_copy(amp):
    """The copy is FP32 and is fed from `parameters()` by hand."""
    model, optimizer = amp.start(mlp())
    mean = copy.deepcopy(model)
    for x, y in batches(4):
        amp.step(mse(model(x), y), optimizer)
        with torch.no_grad():
            for p, q in zip(mean.state_dict().values(), model.state_dict().values()):
                p.lerp_(q, 0.5)
            amp.record(*mean.state_dict().values())


@situation()
def averaged_model(amp):
    model, optimizer = amp.start(mlp())
    if amp.by_hand:
        mean = [value.clone() for value in model.state_dict().values()]
    else:
        mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for number, (x, y) in enumerate(batches(4)):
        amp.step(mse(model(x), y), optimizer)
        if not amp.by_hand:
            mean.update_parameters(model)
            continue
        for value, now in zip(mean, model.state_dict().values()):
            value.copy_(now if number == 0 else value.lerp(now, 0.5))
    amp.record(*(mean if amp.by_hand else mean.module.state_dict().values()))


@situation("O1 O2", letter="q")
def averaged_model_of_a_submodule(amp):
    model, optimizer = amp.start(nn.Sequential(mlp(), nn.Linear(2, 2)))
    keys = [f"0.{key}" for key in mlp().state_dict()]
    if amp.by_hand:
        mean = [model.state_dict()[key].clone() for key in keys]
    else:
        mean = AveragedModel(model[0], multi_avg_fn=get_ema_multi_avg_fn(0.999))
    for number, (x, y) in enumerate(batches(4)):
        amp.step(mse(model(x), y), optimizer)
        if not amp.by_hand:
            mean.update_parameters(model[0])
            continue
        for value, key in zip(mean, keys):
            now = model.state_dict()[key]
            value.copy_(now if number == 0 else value.lerp(now, 1 - 0.999))
    amp.record(*(mean if amp.by_hand else mean.module.state_dict().values()))


@situation()
def a_new_head_in_the_middle(amp):
    model, optimizer = amp.start(mlp())
    plain_loop(amp, model, optimizer, 2)
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.zero_()
    plain_loop(amp, model, optimizer, 2)


@situation("O1")
def swap_module_params_on_conversion(amp):
    was = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model, optimizer = amp.start(mlp())
        plain_loop(amp, model, optimizer, 2)
        model.load_state_dict(mlp(3).state_dict())
        plain_loop(amp, model, optimizer, 2)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(was)


@situation("O1", letter="d")
def swapped_parameters_on_conversion_between_steps(amp):
    was = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model, optimizer = amp.start(mlp())
        plain_loop(amp, model, optimizer, 2)
        optimizer.zero_grad()
        model.to("cpu")
        plain_loop(amp, model, optimizer, 2)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(was)


@situation()
def initialized_again_in_the_middle(amp):
    model, optimizer = amp.start(mlp())
    plain_loop(amp, model, optimizer, 2)
    amp.renew()
    plain_loop(amp, model, optimizer, 2)


@situation("O1 O2", letter="j")
def a_write_right_after_a_checkpoint_was_loaded(amp):
    model, optimizer = amp.start(mlp())
    model.load_state_dict(mlp(3).state_dict())
    model[0].weight.data.clamp_(-0.1, 0.1)
    amp.record(model.state_dict()["0.weight"])
    plain_loop(amp, model, optimizer)


@situation()
def layers_reset_in_the_middle(amp):
    model, optimizer = amp.start(mlp())
    plain_loop(amp, model, optimizer, 2)
    torch.manual_seed(3)
    model[2].reset_parameters()
    plain_loop(amp, model, optimizer, 2)


@situation()
def channels_last_in_the_middle(amp):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 2),
        nn.Flatten(),
        nn.Linear(16, 2),
    )
    model, optimizer = amp.start(net)
    plain_loop(amp, model, optimizer, 2)
    model.to(memory_format=torch.channels_last)
    plain_loop(amp, model, optimizer, 2)


@situation("O2")
def masters_swapped_for_an_evaluation(amp):
    """An EMA of the masters, put in by `.data =` and taken out again."""
    model, optimizer = amp.start(mlp())
    plain_loop(amp, model, optimizer, 1)
    masters = optimizer.param_groups[0]["params"]
    mean = [p.detach() * 0.5 for p in masters]
    for x, y in batches(3):
        was = [p.data for p in masters]
        for p, value in zip(masters, mean):
            p.data = value
        with torch.no_grad():
            amp.record(model(x))
        for p, value in zip(masters, was):
            p.data = value
        amp.step(mse(model(x), y), optimizer)
