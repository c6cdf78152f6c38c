"""One training or evaluation step of a `Task` under each system that is compared.

A system's name begins with what it is: FP32, pure half, autocast, O0 to O3.  What follows may be:
"again" (the reference a second time), "native" (in a process that may use ampatch's native part),
"compiled".
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tasks import Task
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampatch as amp
from ampatch import native

FP32, HALF, AUTOCAST = "FP32", "pure half", "autocast"
AGAIN, COMPILED, NATIVE = " again", " compiled", " native"
SYSTEMS = [AUTOCAST, AUTOCAST + AGAIN, FP32, HALF, "O1", "O2", "O3"]
OURS = ("O0", "O1", "O2", "O3")
MICRO_BATCHES = 4
COMPILER = "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"
SGD = functools.partial(torch.optim.SGD, lr=1e-4)
FUSED = functools.partial(torch.optim.SGD, lr=1e-4, fused=True)


@dataclass(frozen=True)
class How:
    """In which way a step trains; the same for all systems of a table."""

    dtype: torch.dtype = torch.bfloat16
    optimizer: Callable[[Any], torch.optim.Optimizer] = SGD
    situation: str = "plain"  # a key of `SITUATIONS`
    device: str = "cpu"
    always_scaled: bool = True
    """Loss scaling is dynamic wherever a system has it, so that the same work is compared; else
    as a system has it by itself: in float16 alone."""
    init_scale: float = 2.0**16
    compiler: str = COMPILER


def engine(system: str) -> str:
    """What a system is."""
    return HALF if system.startswith(HALF) else system.partition(" ")[0]


def with_native(systems: list[str]) -> list[str]:
    """The systems, and O1 and O2 with the native part beside them where it is built."""
    if native.part is None:
        return systems
    ours = [system for system in systems if system in ("O1", "O2")]
    return [*systems, *(system + NATIVE for system in ours)]


def environment(system: str) -> dict[str, str]:
    """The variables that a system's process needs before it imports ampatch."""
    return {"AMPATCH_NATIVE": "1" if system.endswith(NATIVE) else "0"}


PLAIN = How()


def make_step(task: Task, system: str, how: How = PLAIN) -> Callable[[], None]:
    """The function that does one training step: every loss of the task, each with its optimizer."""
    for module in task.modules:
        module.train()
    if engine(system) == HALF:
        _to_half(task, how.dtype)
    optimizers = [how.optimizer(module.parameters()) for module in task.modules]
    if engine(system) in OURS:
        _initialize(task, optimizers, system, how)
    SITUATIONS[how.situation](task.modules)
    if system.endswith(COMPILED) or how.situation == "compile":
        compiled = [torch.compile(module, backend=how.compiler) for module in task.modules]
        task = task._replace(modules=compiled)
    is_ours, is_scaled = engine(system) in OURS, engine(system) == AUTOCAST
    passes = MICRO_BATCHES if how.situation == "accumulation" else 1
    enabled = how.always_scaled or how.dtype is torch.float16
    scaler = torch.amp.GradScaler(how.device, init_scale=how.init_scale, enabled=enabled)

    def backward(loss_of: Callable, optimizer: torch.optim.Optimizer, more: bool) -> None:
        if is_ours:
            loss = loss_of(task.modules)
            with amp.scale_loss(loss, optimizer, delay_unscale=more) as scaled_loss:
                scaled_loss.backward()
        elif is_scaled:
            with torch.autocast(how.device, dtype=how.dtype):
                loss = loss_of(task.modules)
            scaler.scale(loss).backward()
        else:
            loss_of(task.modules).backward()

    def step() -> None:
        for loss_of, own_optimizer in zip(task.losses, optimizers):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for left in reversed(range(passes)):
                backward(loss_of, own_optimizer, left > 0)
            if is_scaled:
                scaler.step(own_optimizer)
                scaler.update()
            else:
                own_optimizer.step()

    return step


def _initialize(task: Task, optimizers: list, system: str, how: How) -> None:
    settings: dict[str, Any] = {"init_scale": how.init_scale}
    if how.always_scaled:
        settings["loss_scale"] = "dynamic" if engine(system) in ("O1", "O2") else 1.0
    level = engine(system)
    amp.initialize(
        task.modules, optimizers, opt_level=level, dtype=how.dtype, verbosity=0, **settings
    )


def _to_half(task: Task, dtype: torch.dtype) -> None:
    """Models that are all half: their inputs and outputs are cast by hooks."""

    def half(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(x.to(dtype) if x.is_floating_point() else x for x in args)

    for module in task.modules:
        module.to(dtype)
        module.register_forward_pre_hook(half)
        module.register_forward_hook(lambda _, args, output: output.float())


def make_evaluation(task: Task, system: str, how: How) -> Callable[[], None]:
    """The function that evaluates every module's loss once under `no_grad`."""
    for module in task.modules:
        module.eval()
    around: Callable = contextlib.nullcontext
    if engine(system) == HALF:
        _to_half(task, how.dtype)
    elif engine(system) == AUTOCAST:
        around = functools.partial(torch.autocast, how.device, dtype=how.dtype)
    elif engine(system) in OURS:
        amp.initialize(task.modules, opt_level=engine(system), dtype=how.dtype, verbosity=0)
    modules = task.modules
    if how.situation == "compile":
        modules = [torch.compile(module, backend=how.compiler) for module in modules]

    def step() -> None:
        with torch.no_grad(), around():
            for loss_of in task.losses:
                loss_of(modules)

    return step


# Situations: each changes the modules of a task, after `initialize`.


def hooked(modules: list[nn.Module]) -> None:
    """A hook on every parameter."""
    for parameter in [parameter for module in modules for parameter in module.parameters()]:
        parameter.register_hook(lambda grad: None)


def checkpointed(modules: list[nn.Module]) -> None:
    """Activation checkpointing of every layer that has weights; a transformer layer is one."""
    for layer in [layer for module in modules for layer in _layers(module)]:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    whole = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
    if isinstance(module, whole) or not any(True for _ in module.children()):
        if any(True for _ in module.parameters()):
            yield module
        return
    for child in module.children():
        yield from _layers(child)


SITUATIONS: dict[str, Callable[[list[nn.Module]], None]] = {
    "hooks": hooked,
    "checkpoint": checkpointed,
    **dict.fromkeys(("plain", "accumulation", "compile"), lambda modules: None),
}
