"""One training or evaluation step of a `Task` under each system that is compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from models import Task
from torch import nn

import ampatch as amp

FP32, HALF, AUTOCAST = "FP32", "pure half", "autocast"
SYSTEMS = [AUTOCAST, "autocast again", FP32, HALF, "O1", "O2", "O3"]
OPTIMIZERS = {
    "ordinary": lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
    "fused": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, fused=True),
}


def make_step(task: Task, system: str, optimizer: str, dtype: torch.dtype) -> Callable[[], None]:
    """The function that does one training step: every loss of the task, each with its optimizer.

    Loss scaling is dynamic wherever a system has it, in bfloat16 too, so that
    the same work is compared.  `"... hooks"` is a system with a hook on every parameter.
    """
    for module in task.modules:
        module.train()
    level = system.partition(" ")[0]
    if level == HALF.partition(" ")[0]:
        for module in task.modules:
            module.to(dtype)
    optimizers = [OPTIMIZERS[optimizer](module.parameters()) for module in task.modules]
    if level in ("O1", "O2", "O3"):
        return _ampatch_step(task, system, optimizers, dtype)
    if level == AUTOCAST:
        _hook_where_asked(task, system)
        return _autocast_step(task, optimizers, dtype)
    losses = _in_half(task, dtype) if level == HALF.partition(" ")[0] else task.losses

    def step() -> None:
        for loss_of, one in zip(losses, optimizers, strict=True):
            _zero(optimizers)
            loss_of(task.modules).backward()
            one.step()

    return step


def _hook_where_asked(task: Task, system: str) -> None:
    if system.endswith(" hooks"):
        for module in task.modules:
            for parameter in module.parameters():
                parameter.register_hook(lambda grad: None)


def _zero(optimizers: list) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()


def _in_half(task: Task, dtype: torch.dtype) -> list[Callable]:
    """Losses of a model that is all half: its inputs and outputs are cast by hooks."""
    for module in task.modules:
        module.register_forward_pre_hook(lambda _, args: tuple(x.to(dtype) for x in args))
        module.register_forward_hook(lambda _, args, output: output.float())
    return task.losses


def _autocast_step(task: Task, optimizers: list, dtype: torch.dtype) -> Callable[[], None]:
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        for loss_of, one in zip(task.losses, optimizers, strict=True):
            _zero(optimizers)
            with torch.autocast("cpu", dtype=dtype):
                loss = loss_of(task.modules)
            scaler.scale(loss).backward()
            scaler.step(one)
            scaler.update()

    return step


def _ampatch_step(
    task: Task, system: str, optimizers: list, dtype: torch.dtype
) -> Callable[[], None]:
    level = system.partition(" ")[0]
    scale = 1.0 if level == "O3" else "dynamic"
    amp.initialize(
        task.modules, optimizers, opt_level=level, dtype=dtype, loss_scale=scale, verbosity=0
    )
    _hook_where_asked(task, system)

    def step() -> None:
        for loss_of, one in zip(task.losses, optimizers, strict=True):
            _zero(optimizers)
            with amp.scale_loss(loss_of(task.modules), one) as scaled_loss:
                scaled_loss.backward()
            one.step()

    return step


def make_evaluation(task: Task, system: str, dtype: torch.dtype) -> Callable[[], None]:
    """The function that evaluates every module's loss once under `no_grad`."""
    modules: list[nn.Module] = task.modules
    for module in modules:
        module.eval()
    level = system.partition(" ")[0]
    around: Callable = contextlib.nullcontext
    if level == "pure":
        for module in modules:
            module.to(dtype)
        _in_half(task, dtype)
    elif level == AUTOCAST:
        around = lambda: torch.autocast("cpu", dtype=dtype)  # noqa: E731
    elif level != FP32:
        amp.initialize(modules, opt_level=level, dtype=dtype, verbosity=0)

    def step() -> None:
        with torch.no_grad(), around():
            for loss_of in task.losses:
                loss_of(modules)

    return step
