"""Random training programs: lists of actions that both drivers can run.

A program is a list of `(action, number)`, the first one the optimizer; the number is all that an
action draws its choices from.
`replay("O2", "fp16", [("train", 3), ...])` runs one against the oracle.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from drivers import Ampatch, ByHand, Driver, differ
from situations import HALVES, mse
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampatch

Program = list[tuple[str, int]]


class Net(nn.Module):
    """Layers in a row, one used twice, one that joins the optimizer late."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.shared = nn.Linear(4, 6), nn.Linear(6, 6)
        self.late, self.head = nn.Linear(6, 6), nn.Linear(6, 2)
        self.late.requires_grad_(False)

    def body(self, x: Tensor) -> Tensor:
        return F.relu(self.shared(torch.tanh(self.shared(x))))

    def forward(self, x: Tensor, checkpointed: bool = False) -> Tensor:
        x = torch.tanh(self.first(x))
        x = checkpoint(self.body, x, use_reentrant=False) if checkpointed else self.body(x)
        return self.head(x + self.late(x))


class Run:
    """A program in progress, under one driver."""

    def __init__(self, amp: Driver, adam: bool) -> None:
        self.amp = amp
        make = torch.optim.AdamW if adam else torch.optim.SGD
        options = {"lr": 0.01} if adam else {"lr": 0.05, "momentum": 0.9}
        net = Net()
        trained = [p for p in net.parameters() if p.requires_grad]
        self.model, self.optimizer = amp.start(net, make(trained, **options))
        self.waiting: list[Tensor] = []
        self.handles: list[Any] = []
        self.accumulated: list[list[Tensor]] = [[] for _ in range(8)]  # in no order among weights
        self.kept = self.state()
        self.mean = self.state()
        self.joined = False

    def state(self) -> dict[str, Tensor]:
        return {key: value.clone() for key, value in self.model.state_dict().items()}

    def loss(self, number: int, **options: Any) -> Tensor:
        x, y = batch(number)
        return mse(self.model(x, **options), y)

    def weight(self, number: int) -> Tensor:
        return list(self.model.parameters())[number % 8]

    def params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def moves_weights(self) -> None:
        """What waits has the weights in its graph (O3), or a recompute would ask for them (O2)."""
        if self.amp.is_half_model:
            self.waiting.clear()


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(5, 4, generator=generator), torch.randn(5, 2, generator=generator)


ACTIONS: dict[str, Callable[[Run, int], None]] = {}
OFTEN = ("train", "train", "accumulate", "forward", "backward", "step", "zero_by_optimizer")


def action(function: Callable[[Run, int], None]) -> Callable[[Run, int], None]:
    """Add an action; it must do the same under both drivers."""
    ACTIONS[function.__name__] = function
    return function


# Passes


@action
def train(run: Run, number: int) -> None:
    run.moves_weights()
    run.amp.step(run.loss(number), run.optimizer)


@action
def accumulate(run: Run, number: int) -> None:
    run.amp.backward(run.loss(number) / 2, run.optimizer)


@action
def forward(run: Run, number: int) -> None:
    run.waiting.append(run.loss(number))


@action
def forward_checkpointed(run: Run, number: int) -> None:
    run.waiting.append(run.loss(number, checkpointed=True))


@action
def backward(run: Run, number: int) -> None:
    if run.waiting:
        run.amp.backward(run.waiting.pop(number % len(run.waiting)), run.optimizer)


@action
def backward_of_all(run: Run, number: int) -> None:
    if run.waiting:
        run.amp.backward(sum(run.waiting), run.optimizer)
        run.waiting.clear()


@action
def backward_twice(run: Run, number: int) -> None:
    loss = run.loss(number)
    with run.amp.scaled(loss, run.optimizer) as scaled:
        scaled.backward(retain_graph=True)
        scaled.backward()


@action
def backward_in_two_blocks(run: Run, number: int) -> None:
    loss = run.loss(number)
    run.amp.backward(loss, run.optimizer, retain_graph=True)
    run.amp.backward(loss, run.optimizer)


@action
def backward_for_one_weight(run: Run, number: int) -> None:
    run.amp.backward(run.loss(number), run.optimizer, inputs=[run.model.head.weight])


@action
def backward_without_scaler(run: Run, number: int) -> None:
    run.amp.plain_backward(run.loss(number) / 2)


@action
def forget_waiting(run: Run, number: int) -> None:
    run.waiting.clear()


@action
def train_with_penalty(run: Run, number: int) -> None:
    run.moves_weights()
    run.optimizer.zero_grad()
    loss = run.loss(number)
    (grad,) = torch.autograd.grad(loss, run.model.head.weight, create_graph=True)
    run.amp.backward(loss + grad.float().square().sum(), run.optimizer)
    run.optimizer.step()


@action
def ask_for_gradients(run: Run, number: int) -> None:
    loss = run.loss(number)
    params = [p for p in run.model.parameters() if p.requires_grad]
    run.amp.record(*torch.autograd.grad(loss, params))


@action
def train_on_nan(run: Run, number: int) -> None:
    if run.amp.level == "O3" or run.amp.half is torch.bfloat16:
        return  # a static scale: the NaN would stay
    run.moves_weights()
    run.amp.step(run.loss(number) * math.nan, run.optimizer)
    run.optimizer.zero_grad()


@action
def forward_fails(run: Run, number: int) -> None:
    try:
        run.model(torch.zeros(5, 3))
    except RuntimeError:
        return
    raise AssertionError("a forward on a wrong shape went through")


@action
def block_fails(run: Run, number: int) -> None:
    loss = run.loss(number)
    try:
        with run.amp.scaled(loss, run.optimizer) as scaled:
            scaled.backward()
            raise ZeroDivisionError
    except ZeroDivisionError:
        if run.amp.level == "O3" or run.amp.half is torch.bfloat16:
            run.optimizer.zero_grad()  # a scale of 1: what a pass has left is there, as in FP32


@action
def forward_without_casts(run: Run, number: int) -> None:
    if run.amp.level == "O1":
        x, y = batch(number)
        run.amp.backward(mse(run.amp.uncast(run.model, x), y), run.optimizer)


# Evaluation


@action
def evaluate(run: Run, number: int) -> None:
    with torch.no_grad():
        run.amp.record(run.model(batch(number)[0]))


@action
def evaluate_in_inference_mode(run: Run, number: int) -> None:
    run.model.eval()
    with torch.inference_mode():
        run.amp.record(run.model(batch(number)[0]))
    run.model.train()


@action
def evaluate_swapped(run: Run, number: int) -> None:
    """EMA weights by `.data`, an evaluation, and back."""
    was = [p.data.clone() for p in run.model.parameters()]
    for p, value in zip(run.model.parameters(), run.mean.values()):
        p.data.copy_(value)
    evaluate(run, number)
    for p, value in zip(run.model.parameters(), was):
        p.data.copy_(value)


@action
def evaluate_a_copy(run: Run, number: int) -> None:
    run.amp.record(*copy.deepcopy(run.model).state_dict().values())


@action
def train_a_copy(run: Run, number: int) -> None:
    model, optimizer = run.amp.pair(run.model, run.optimizer)
    x, y = batch(number)
    optimizer.zero_grad()
    with run.amp.no_casts():
        mse(model(x.to(next(model.parameters()).dtype)).float(), y).backward()
    optimizer.step()
    run.amp.record(*model.parameters())


# Steps


@action
def step(run: Run, number: int) -> None:
    run.moves_weights()
    run.optimizer.step()


@action
def step_with_closure(run: Run, number: int) -> None:
    run.moves_weights()

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = run.loss(number)
        run.amp.backward(loss, run.optimizer)
        return loss

    run.amp.record(run.optimizer.step(closure))


@action
def sam(run: Run, number: int) -> None:
    run.moves_weights()
    run.optimizer.zero_grad()
    run.amp.backward(run.loss(number), run.optimizer)
    params = [p for p in run.params() if p.grad is not None]
    with torch.no_grad():
        was = [p.clone() for p in params]
        for p in params:
            p.add_(p.grad, alpha=0.1)
    run.optimizer.zero_grad()
    run.amp.backward(run.loss(number), run.optimizer)
    with torch.no_grad():
        for p, value in zip(params, was):
            p.copy_(value)
    run.optimizer.step()


@action
def change_learning_rate(run: Run, number: int) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = 0.01 * (1 + number % 5)


@action
def change_weight_decay(run: Run, number: int) -> None:
    run.optimizer.param_groups[0]["weight_decay"] = 0.05 * (number % 3)


@action
def reload_optimizer(run: Run, number: int) -> None:
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


@action
def join_late_layer(run: Run, number: int) -> None:
    if run.joined:
        return
    run.moves_weights()
    run.joined = True
    run.model.late.requires_grad_(True)
    run.amp.add_group(run.optimizer, list(run.model.late.parameters()), lr=0.02)


# Gradients


@action
def zero_by_optimizer(run: Run, number: int) -> None:
    run.optimizer.zero_grad()


@action
def zero_to_zeros(run: Run, number: int) -> None:
    run.optimizer.zero_grad(set_to_none=False)


@action
def zero_by_model(run: Run, number: int) -> None:
    run.model.zero_grad()


@action
def zero_by_none(run: Run, number: int) -> None:
    for p in run.model.parameters():
        p.grad = None


@action
def zero_in_place(run: Run, number: int) -> None:
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad.zero_()


@action
def clip_norm(run: Run, number: int) -> None:
    run.amp.record(run.amp.clip(run.model, run.optimizer, 0.1))


@action
def clip_value(run: Run, number: int) -> None:
    if any(p.grad is not None for p in run.params()):  # else torch itself raises
        run.amp.clip_value(run.model, run.optimizer, 0.02)


@action
def write_a_gradient(run: Run, number: int) -> None:
    p = run.weight(number)
    if p.requires_grad:
        p.grad = torch.full_like(p, 0.125)


@action
def scale_gradients(run: Run, number: int) -> None:
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


@action
def log_norms(run: Run, number: int) -> None:
    run.amp.record(*[p.grad.float().norm() for p in run.model.parameters() if p.grad is not None])


@action
def hook_a_weight(run: Run, number: int) -> None:
    p = run.weight(number)
    if p.requires_grad:
        run.handles.append(p.register_hook(lambda g: g * 0.5))


@action
def hook_an_accumulator(run: Run, number: int) -> None:
    seen = run.accumulated[number % 8]

    def note(p: Tensor) -> None:
        seen.append(torch.zeros(()) if p.grad is None else p.grad.double() / 1024)

    p = run.weight(number)
    if p.requires_grad and run.amp.level == "O1":
        run.handles.append(p.register_post_accumulate_grad_hook(note))


@action
def hook_a_module(run: Run, number: int) -> None:
    run.handles.append(run.model.shared.register_forward_hook(lambda m, args, out: out * 0.5))


@action
def hook_a_modules_backward(run: Run, number: int) -> None:
    run.handles.append(run.model.head.register_full_backward_hook(lambda *_: None))


@action
def remove_hooks(run: Run, number: int) -> None:
    for handle in run.handles:
        handle.remove()
    run.handles.clear()


# Weights


@action
def freeze(run: Run, number: int) -> None:
    run.moves_weights()
    run.model.first.requires_grad_(False)


@action
def unfreeze(run: Run, number: int) -> None:
    run.moves_weights()
    run.model.first.requires_grad_(True)


@action
def write_by_data(run: Run, number: int) -> None:
    run.moves_weights()
    run.weight(number).data.mul_(0.75)


@action
def clamp_by_data(run: Run, number: int) -> None:
    run.moves_weights()
    for p in run.model.shared.parameters():
        p.data.clamp_(-0.25, 0.25)


@action
def write_under_no_grad(run: Run, number: int) -> None:
    run.moves_weights()
    with torch.no_grad():
        run.weight(number).mul_(0.75)


@action
def replace_data(run: Run, number: int) -> None:
    run.moves_weights()
    p = run.weight(number)
    p.data = p.data * 0.75


@action
def write_stepped_weights(run: Run, number: int) -> None:
    run.moves_weights()
    with torch.no_grad():
        for p in run.params():
            p.mul_(0.95)


@action
def write_stepped_weights_by_data(run: Run, number: int) -> None:
    run.moves_weights()
    for p in run.params():
        p.data.mul_(0.95)


@action
def write_into_state_dict(run: Run, number: int) -> None:
    run.moves_weights()
    for key, value in run.model.state_dict().items():
        value.lerp_(run.mean[key], 0.25)


@action
def update_mean(run: Run, number: int) -> None:
    for key, value in run.model.state_dict().items():
        run.mean[key].lerp_(value.to(run.mean[key].dtype), 0.5)


@action
def keep(run: Run, number: int) -> None:
    run.kept = run.state()


@action
def roll_back(run: Run, number: int) -> None:
    run.moves_weights()
    run.model.load_state_dict(run.kept)


@action
def load_others(run: Run, number: int) -> None:
    run.moves_weights()
    run.model.load_state_dict(Net(number % 7).state_dict())


# Sessions


@action
def initialize_again(run: Run, number: int) -> None:
    run.waiting.clear()
    run.optimizer.zero_grad()
    run.amp.renew()


@action
def reload_scaler(run: Run, number: int) -> None:
    if not run.amp.by_hand:
        ampatch.load_state_dict(ampatch.state_dict())


@action
def change_loss_scale(run: Run, number: int) -> None:
    if run.amp.half is torch.float16 and run.amp.level != "O3":
        run.amp.set_scale(2.0 ** (6 + number % 6))


def program(seed: int, length: int = 25) -> Program:
    """A program that ends with a step and an evaluation."""
    chance = random.Random(seed)
    names = list(ACTIONS)
    chosen = [
        (
            chance.choice(OFTEN) if chance.random() < 0.5 else chance.choice(names),
            chance.randrange(1000),
        )
        for _ in range(length)
    ]
    return [(chance.choice(["sgd", "adam"]), 0), *chosen, ("train", 1), ("evaluate", 2)]


def results(driver: Driver, actions: Program) -> list[Tensor]:
    """What a run recorded, and its final weights."""
    run = Run(driver, adam=actions[0][0] == "adam" and driver.level != "O3")
    for name, number in actions[1:]:
        ACTIONS[name](run, number)
    return [*driver.seen, *itertools.chain(*run.accumulated), *driver.weights()]


def fault(level: str, half: str, actions: Program) -> str:
    """What goes wrong with a program under ampatch; empty if nothing does."""
    expected = results(ByHand(level, HALVES[half]), actions)
    try:
        found = results(Ampatch(level, HALVES[half]), actions)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        ampatch.deactivate()
    if len(found) != len(expected):
        return f"{len(found)} values were recorded, {len(expected)} expected"
    for index, (want, have) in enumerate(zip(expected, found)):
        if want.shape != have.shape or differ(want, have).any():
            return f"value {index} of {len(expected)}: expected {want}, found {have}"
    return ""


def shortened(level: str, half: str, actions: Program) -> Program:
    """The program without the actions that its fault does not need."""
    for index in reversed(range(1, len(actions))):
        fewer = actions[:index] + actions[index + 1 :]
        if fault(level, half, fewer):
            actions = fewer
    return actions


def replay(level: str, half: str, actions: Program) -> None:
    """Run a program; raise `AssertionError` with the short program if it goes wrong."""
    if fault(level, half, actions):
        short = shortened(level, half, actions)
        listed = "".join(f"    {one!r},\n" for one in short)
        raise AssertionError(
            f"{fault(level, half, short)}\nreplay({level!r}, {half!r}, [\n{listed}])"
        )
