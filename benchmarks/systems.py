"""One training or evaluation step of a `Task` under each system that is compared.

The first word of a system says what it is; `"autocast again"` is autocast, `"O1 native"`
is O1 in a process that may use ampatch's native part (`environment`).  `"O2 cached"` evaluates
inside `cached_weights`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from models import Task
from torch import nn
from ways_to_train import MICRO_BATCHES, SITUATIONS

import ampatch as amp

try:
    from ampatch import native
except ImportError:  # a version before it, to compare with
    native = None

FP32, HALF, AUTOCAST, AGAIN = "FP32", "pure half", "autocast", "autocast again"
SYSTEMS = [AUTOCAST, AGAIN, FP32, HALF, "O1", "O2", "O3"]
CACHED = " cached"
NATIVE = " native"
OPTIMIZERS = {
    "ordinary": lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
    "fused": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, fused=True),
}


def with_native(systems: list[str]) -> list[str]:
    """The systems, and O1 and O2 with the native part beside them if this ampatch has one built."""
    if native is None or native.part is None:
        return systems
    ours = [one for one in systems if one.removesuffix(CACHED) in ("O1", "O2")]
    return [*systems, *(one + NATIVE for one in ours)]


def environment(system: str) -> dict[str, str]:
    """The variables that a system's process needs before it imports ampatch."""
    return {"AMPATCH_NATIVE": "1" if system.endswith(NATIVE) else "0"}


def make_step(
    task: Task, system: str, optimizer: str, dtype: torch.dtype, situation: str = "plain"
) -> Callable[[], None]:
    """The function that does one training step: every loss of the task, each with its optimizer.

    Loss scaling is dynamic wherever a system has it, in bfloat16 too, so that
    the same work is compared.  `situation` is a key of `ways_to_train.SITUATIONS`.
    """
    for module in task.modules:
        module.train()
    level = system.partition(" ")[0]
    if level == HALF.partition(" ")[0]:
        _to_half(task, dtype)
    optimizers = [OPTIMIZERS[optimizer](module.parameters()) for module in task.modules]
    if level in ("O1", "O2", "O3"):
        scale = 1.0 if level == "O3" else "dynamic"
        amp.initialize(
            task.modules, optimizers, opt_level=level, dtype=dtype, loss_scale=scale, verbosity=0
        )
    task = task._replace(modules=SITUATIONS[situation](task.modules))
    passes = [True] * (MICRO_BATCHES - 1) if situation == "accumulation" else []
    passes.append(False)
    if level in ("O1", "O2", "O3"):
        return _ampatch_step(task, optimizers, passes)
    if level == AUTOCAST:
        return _autocast_step(task, optimizers, passes, dtype)

    def step() -> None:
        for loss_of, one in zip(task.losses, optimizers, strict=True):
            _zero(optimizers)
            for _ in passes:
                loss_of(task.modules).backward()
            one.step()

    return step


def _zero(optimizers: list) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()


def _to_half(task: Task, dtype: torch.dtype) -> None:
    """Models that are all half: their inputs and outputs are cast by hooks."""
    for module in task.modules:
        module.to(dtype)
        module.register_forward_pre_hook(lambda _, args: tuple(x.to(dtype) for x in args))
        module.register_forward_hook(lambda _, args, output: output.float())


def _autocast_step(
    task: Task, optimizers: list, passes: list[bool], dtype: torch.dtype
) -> Callable[[], None]:
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        for loss_of, one in zip(task.losses, optimizers, strict=True):
            _zero(optimizers)
            for _ in passes:
                with torch.autocast("cpu", dtype=dtype):
                    loss = loss_of(task.modules)
                scaler.scale(loss).backward()
            scaler.step(one)
            scaler.update()

    return step


def _ampatch_step(task: Task, optimizers: list, passes: list[bool]) -> Callable[[], None]:
    def step() -> None:
        for loss_of, one in zip(task.losses, optimizers, strict=True):
            _zero(optimizers)
            for more in passes:
                loss = loss_of(task.modules)
                with amp.scale_loss(loss, one, delay_unscale=more) as scaled_loss:
                    scaled_loss.backward()
            one.step()

    return step


def make_parts(task: Task, system: str, dtype: torch.dtype) -> Callable[[], Iterator[None]]:
    """A training step that stops after each of its six parts; `task` has one optimizer.

    zero_grad; forward; what scales the loss; backward; what unscales; the optimizer's step.
    """
    [model], [loss_of] = task.modules, task.losses
    model.train()
    level = system.partition(" ")[0]
    if level == HALF.partition(" ")[0]:
        _to_half(task, dtype)
    optimizer = OPTIMIZERS["ordinary"](model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    is_ours, is_scaled = level in ("O1", "O2"), level == AUTOCAST
    if is_ours:
        amp.initialize(
            model, optimizer, opt_level=level, dtype=dtype, loss_scale="dynamic", verbosity=0
        )

    def step() -> Iterator[None]:
        optimizer.zero_grad()
        yield
        with torch.autocast("cpu", dtype=dtype) if is_scaled else contextlib.nullcontext():
            loss = loss_of(task.modules)
        yield
        if is_ours:
            block = amp.scale_loss(loss, optimizer)
            loss = block.__enter__()
        elif is_scaled:
            loss = scaler.scale(loss)
        yield
        loss.backward()
        yield
        if is_ours:
            block.__exit__(None, None, None)
        yield
        if is_scaled:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        yield

    return step


def make_evaluation(task: Task, system: str, dtype: torch.dtype) -> Callable[[], None]:
    """The function that evaluates every module's loss once under `no_grad`."""
    modules: list[nn.Module] = task.modules
    for module in modules:
        module.eval()
    level = system.partition(" ")[0]
    around: Callable = contextlib.nullcontext
    if level == HALF.partition(" ")[0]:
        _to_half(task, dtype)
    elif level == AUTOCAST:
        around = lambda: torch.autocast("cpu", dtype=dtype)  # noqa: E731
    elif level != FP32:
        amp.initialize(modules, opt_level=level, dtype=dtype, verbosity=0)
        if CACHED in system:
            amp.cached_weights(modules).__enter__()  # it lasts as long as the process

    def step() -> None:
        with torch.no_grad(), around():
            for loss_of in task.losses:
                loss_of(modules)

    return step
