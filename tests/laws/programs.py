"""Random training programs: lists of actions that both drivers can run.

A program is a list of `(action, number)`, the first one the optimizer; the number is all that an
action draws its choices from.
`replay("O2", "fp16", [("train", 3), ...])` runs one against the oracle.
"""

import copy
import itertools
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from drivers import Ampatch, ByHand, Driver, differ
from situations import HALVES, mse
from situations_gradients import RESETS
from situations_weights import replaced
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampatch

Program = list[tuple[str, int]]


class Net(nn.Module):
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


SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
AdamW = partial(torch.optim.AdamW, lr=0.01)
OPTIMIZERS = {
    "sgd": SGD,
    "sgd fused": partial(SGD, fused=True),
    "adam": AdamW,
    "adam fused": partial(AdamW, fused=True),
    "adam foreach": partial(AdamW, foreach=True),
}
SCALING = {"num_losses": 2, "growth_interval": 3, "max_loss_scale": 2.0**12}


class Run:
    def __init__(self, amp: Driver, optimizer: str) -> None:
        self.amp = amp
        make = OPTIMIZERS[optimizer]
        self.model, self.optimizer = amp.start(
            Net(), lambda params: make([p for p in params if p.requires_grad]), **SCALING
        )
        self.waiting: list[Tensor] = []
        self.handles: list[Any] = []
        self.accumulated: list[list[Tensor]] = [[] for _ in range(8)]  # in no order among weights
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

    def has_static_scale(self) -> bool:
        return self.amp.level == "O3" or self.amp.half is torch.bfloat16

    def moves_weights(self) -> None:
        """What waits has the weights in its graph (O3), or a recompute would ask for them (O2)."""
        if self.amp.is_half_model:
            self.waiting.clear()


def poisoned(grad: Tensor, where: int, bad: float) -> Tensor:
    grad = grad.clone()
    grad.view(-1)[where % grad.numel()] = bad
    return grad


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(5, 4, generator=generator), torch.randn(5, 2, generator=generator)


class Actions(Run):
    """What a program may do: each does the same under both drivers."""

    # Passes

    def backward(self, number: int) -> None:
        if self.waiting:
            self.amp.backward(self.waiting.pop(number % len(self.waiting)), self.optimizer)

    def backward_of_all(self, number: int) -> None:
        if self.waiting:
            self.amp.backward(sum(self.waiting), self.optimizer)
            self.waiting.clear()

    def backward_twice(self, number: int) -> None:
        loss = self.loss(number)
        with self.amp.scaled(loss, self.optimizer) as scaled:
            scaled.backward(retain_graph=True)
            scaled.backward()

    def train_with_penalty(self, number: int) -> None:
        self.moves_weights()
        self.optimizer.zero_grad()
        loss = self.loss(number)
        (grad,) = torch.autograd.grad(loss, self.model.head.weight, create_graph=True)
        self.amp.backward(loss + grad.float().square().sum(), self.optimizer)
        self.optimizer.step()

    def ask_for_gradients(self, number: int) -> None:
        loss = self.loss(number)
        params = [p for p in self.model.parameters() if p.requires_grad]
        self.amp.record(*torch.autograd.grad(loss, params))

    def overflow(self, number: int) -> None:
        """An inf or NaN of the loss, on its way to a weight or at rest, in the block of a loss
        scale; maybe another block comes before it is unscaled.  The step is skipped, or the
        gradients are thrown away and the next step is not."""
        if self.has_static_scale():
            return  # the NaN would stay
        self.moves_weights()
        loss_id, delays, is_stepped = number % 2, number % 3 == 0, number % 5 < 3
        bad, weight = (math.inf, math.nan)[number % 7 % 2], self.model.head.weight
        where = ("loss", "hook", "grad")[number % 11 % 3]
        handle = weight.register_hook(lambda grad: poisoned(grad, number, bad))
        if where != "hook":
            handle.remove()
        loss = self.loss(number) * (bad if where == "loss" else 1)
        with self.amp.scaled(loss, self.optimizer, loss_id=loss_id, delay_unscale=delays) as scaled:
            scaled.backward()
            if where == "grad":
                weight.grad.copy_(poisoned(weight.grad, number, bad))
        handle.remove()
        if delays:
            self.amp.backward(self.loss(number), self.optimizer, {"loss_id": loss_id})
        self.amp.record(self.amp.scale(loss_id))
        if is_stepped:
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.model.zero_grad(set_to_none=number % 2 == 0)
            self.amp.backward(self.loss(number), self.optimizer)
            self.optimizer.step()

    def forward_fails(self, number: int) -> None:
        try:
            self.model(torch.zeros(5, 3))
        except RuntimeError:
            return
        raise AssertionError("a forward on a wrong shape went through")

    def block_fails(self, number: int) -> None:
        loss = self.loss(number)
        try:
            with self.amp.scaled(loss, self.optimizer) as scaled:
                scaled.backward()
                raise ZeroDivisionError
        except ZeroDivisionError:
            if self.has_static_scale():
                self.optimizer.zero_grad()  # a scale of 1: the pass has left them, as in FP32

    def forward_without_casts(self, number: int) -> None:
        if self.amp.level == "O1":
            x, y = batch(number)
            self.amp.backward(mse(self.amp.uncast(self.model, x), y), self.optimizer)

    # Evaluation

    def evaluate(self, number: int) -> None:
        with torch.no_grad():
            self.amp.record(self.model(batch(number)[0]))

    def evaluate_in_inference_mode(self, number: int) -> None:
        self.model.eval()
        with torch.inference_mode():
            self.amp.record(self.model(batch(number)[0]))
        self.model.train()

    def evaluate_swapped(self, number: int) -> None:
        """EMA weights by `.data`, an evaluation, and back."""
        was = [p.data.clone() for p in self.model.parameters()]
        for p, value in zip(self.model.parameters(), self.mean.values()):
            p.data.copy_(value)
        self.evaluate(number)
        for p, value in zip(self.model.parameters(), was):
            p.data.copy_(value)

    def train_a_copy(self, number: int) -> None:
        model, optimizer = self.amp.pair(self.model, self.optimizer)
        x, y = batch(number)
        optimizer.zero_grad()
        with self.amp.no_casts():
            mse(model(x.to(next(model.parameters()).dtype)).float(), y).backward()
        optimizer.step()
        self.amp.record(*model.parameters())

    # Steps

    def step_with_closure(self, number: int) -> None:
        self.moves_weights()

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(number)
            self.amp.backward(loss, self.optimizer)
            return loss

        self.amp.record(self.optimizer.step(closure))

    def sam(self, number: int) -> None:
        self.moves_weights()
        self.optimizer.zero_grad()
        self.amp.backward(self.loss(number), self.optimizer)
        params = [p for p in self.params() if p.grad is not None]
        with torch.no_grad():
            was = [p.clone() for p in params]
            for p in params:
                p.add_(p.grad, alpha=0.1)
        self.optimizer.zero_grad()
        self.amp.backward(self.loss(number), self.optimizer)
        with torch.no_grad():
            for p, value in zip(params, was):
                p.copy_(value)
        self.optimizer.step()

    def change_learning_rate(self, number: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * (1 + number % 5)

    def join_late_layer(self, number: int) -> None:
        if self.joined:
            return
        self.moves_weights()
        self.joined = True
        self.model.late.requires_grad_(True)
        self.optimizer.add_param_group({"params": list(self.model.late.parameters()), "lr": 0.02})

    # Gradients

    def clip_value(self, number: int) -> None:
        if any(p.grad is not None for p in self.params()):  # else torch itself raises
            torch.nn.utils.clip_grad_value_(self.model.parameters(), 0.02)

    def write_a_gradient(self, number: int) -> None:
        p = self.weight(number)
        if p.requires_grad:
            p.grad = torch.full_like(p, 0.125)

    def scale_gradients(self, number: int) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)

    def log_norms(self, number: int) -> None:
        self.amp.record(
            *[p.grad.float().norm() for p in self.model.parameters() if p.grad is not None]
        )

    def hook_a_weight(self, number: int) -> None:
        p = self.weight(number)
        if p.requires_grad:
            self.handles.append(p.register_hook(lambda g: g * 0.5))

    def hook_an_accumulator(self, number: int) -> None:
        seen = self.accumulated[number % 8]

        def note(p: Tensor) -> None:
            seen.append(torch.zeros(()) if p.grad is None else p.grad.double() / 1024)

        p = self.weight(number)
        if p.requires_grad and self.amp.level == "O1":
            self.handles.append(p.register_post_accumulate_grad_hook(note))

    def remove_hooks(self, number: int) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    # Weights

    def write_into_state_dict(self, number: int) -> None:
        self.moves_weights()
        for key, value in self.model.state_dict().items():
            value.lerp_(self.mean[key], 0.25)

    def update_mean(self, number: int) -> None:
        for key, value in self.model.state_dict().items():
            self.mean[key].lerp_(value.to(self.mean[key].dtype), 0.5)

    # Sessions

    def initialize_again(self, number: int) -> None:
        self.waiting.clear()
        self.optimizer.zero_grad()
        self.amp.renew()

    def reload_scaler(self, number: int) -> None:
        if not self.amp.by_hand:
            ampatch.load_state_dict(ampatch.state_dict())

    def change_loss_scale(self, number: int) -> None:
        if not self.has_static_scale():
            self.amp.set_scale(2.0 ** (6 + number % 6))


def resets(reset: Callable) -> Callable[[Actions, int], None]:
    return lambda run, number: reset(run.amp, run.model, run.optimizer)


def moving(act: Callable) -> Callable[[Actions, int], None]:
    def action(run: Actions, number: int) -> None:
        run.moves_weights()
        act(run, number)

    return action


def writes(write: Callable) -> Callable[[Actions, int], None]:
    return moving(lambda run, number: write(run.weight(number)))


ACTIONS: dict[str, Callable[[Actions, int], None]] = {
    **{name: action for name, action in vars(Actions).items() if not name.startswith("_")},
    "train": moving(lambda run, n: run.amp.step(run.loss(n), run.optimizer)),
    "accumulate": lambda run, n: run.amp.backward(run.loss(n) / 2, run.optimizer),
    "accumulate without the scaler": lambda run, n: run.amp.plain_backward(run.loss(n) / 2),
    "accumulate for one weight": lambda run, n: run.amp.backward(
        run.loss(n), run.optimizer, inputs=[run.model.head.weight]
    ),
    "forward": lambda run, n: run.waiting.append(run.loss(n, checkpointed=n % 3 == 0)),
    "forget what waits": lambda run, n: run.waiting.clear(),
    "step": moving(lambda run, n: run.optimizer.step()),
    "zero": lambda run, n: run.optimizer.zero_grad(),
    "clip norm": lambda run, n: run.amp.record(
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    ),
    "reload optimizer": lambda run, n: run.optimizer.load_state_dict(
        copy.deepcopy(run.optimizer.state_dict())
    ),
    "load other weights": moving(lambda run, n: run.model.load_state_dict(Net(n % 7).state_dict())),
    "freeze or unfreeze": moving(lambda run, n: run.model.first.requires_grad_(n % 2 == 0)),
    "hook a module": lambda run, n: run.handles.append(
        run.model.shared.register_forward_hook(lambda m, args, out: out * 0.5)
    ),
    "hook a module's backward": lambda run, n: run.handles.append(
        run.model.head.register_full_backward_hook(lambda *_: None)
    ),
    **{f"gradients {name}": resets(reset) for name, reset in RESETS.items()},
    "write by data": writes(lambda p: p.data.mul_(0.75)),
    "write a clamp": writes(lambda p: p.data.clamp_(-0.25, 0.25)),
    "write under no_grad": writes(torch.no_grad()(lambda p: p.mul_(0.75))),
    "write by replacing data": writes(replaced),
}
OFTEN = ("train", "train", "accumulate", "forward", "backward", "step", "zero")


def program(seed: int, length: int = 25) -> Program:
    chance = random.Random(seed)
    names = list(ACTIONS)
    chosen = [
        (
            chance.choice(OFTEN) if chance.random() < 0.5 else chance.choice(names),
            chance.randrange(1000),
        )
        for _ in range(length)
    ]
    return [(chance.choice(list(OPTIMIZERS)), 0), *chosen, ("train", 1), ("evaluate", 2)]


def results(driver: Driver, actions: Program) -> list[Tensor]:
    run = Actions(driver, actions[0][0] if driver.level != "O3" else "sgd")
    for name, number in actions[1:]:
        ACTIONS[name](run, number)
    return [*driver.seen, *itertools.chain(*run.accumulated), *driver.weights()]


def fault(level: str, half: str, actions: Program) -> str:
    expected = results(ByHand(level, HALVES[half]), actions)
    try:
        actual = results(Ampatch(level, HALVES[half]), actions)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        ampatch.deactivate()
    if len(actual) != len(expected):
        return f"{len(actual)} values were recorded, {len(expected)} expected"
    for index, (want, have) in enumerate(zip(expected, actual)):
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
        listed = "".join(f"    {action!r},\n" for action in short)
        raise AssertionError(
            f"{fault(level, half, short)}\nreplay({level!r}, {half!r}, [\n{listed}])"
        )
