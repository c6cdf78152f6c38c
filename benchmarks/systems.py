"""One training or evaluation step of a `Task` under each system that is compared.

A system's name begins with what it is: FP32, pure half, autocast, O0 to O3.  What follows may be:
"again" (the reference a second time), "native" (in a process that may use ampatch's native part),
"cached" (evaluated inside `cached_weights`), "compiled", "without LEVER" (speed.py).
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tasks import Task
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampatch as amp
from ampatch import native

FP32, HALF, AUTOCAST = "FP32", "pure half", "autocast"
AGAIN, CACHED, COMPILED, NATIVE = " again", " cached", " compiled", " native"
WITHOUT = " without "  # and the name of a lever
SYSTEMS = [AUTOCAST, AUTOCAST + AGAIN, FP32, HALF, "O1", "O2", "O3"]
OURS = ("O0", "O1", "O2", "O3")
MICRO_BATCHES = 4
RANKS = 2
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
    ours = [one for one in systems if one.removesuffix(CACHED) in ("O1", "O2")]
    return [*systems, *(one + NATIVE for one in ours)]


def environment(system: str) -> dict[str, str]:
    """The variables that a system's process needs before it imports ampatch."""
    return {"AMPATCH_NATIVE": "1" if system.partition(WITHOUT)[0].endswith(NATIVE) else "0"}


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
    modules = SITUATIONS[how.situation](task.modules)
    if system.endswith(COMPILED) or how.situation == "compile":
        modules = [torch.compile(module, backend=how.compiler) for module in modules]
    task = task._replace(modules=modules)
    passes = [True] * (MICRO_BATCHES - 1) if how.situation == "accumulation" else []
    passes.append(False)
    if engine(system) in OURS:
        return _ampatch_step(task, optimizers, passes)
    if engine(system) == AUTOCAST:
        return _autocast_step(task, optimizers, passes, how)

    def step() -> None:
        for loss_of, one in zip(task.losses, optimizers):
            _zero(optimizers)
            for _ in passes:
                loss_of(task.modules).backward()
            one.step()

    return step


def _initialize(task: Task, optimizers: list, system: str, how: How) -> None:
    settings: dict[str, Any] = {"init_scale": how.init_scale}
    if how.always_scaled:
        settings["loss_scale"] = "dynamic" if engine(system) in ("O1", "O2") else 1.0
    level = engine(system)
    amp.initialize(
        task.modules, optimizers, opt_level=level, dtype=how.dtype, verbosity=0, **settings
    )


def _zero(optimizers: list) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()


def _to_half(task: Task, dtype: torch.dtype) -> None:
    """Models that are all half: their inputs and outputs are cast by hooks."""

    def half(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(x.to(dtype) if x.is_floating_point() else x for x in args)

    for module in task.modules:
        module.to(dtype)
        module.register_forward_pre_hook(half)
        module.register_forward_hook(lambda _, args, output: output.float())


def _scaler(how: How) -> torch.amp.GradScaler:
    enabled = how.always_scaled or how.dtype is torch.float16
    return torch.amp.GradScaler(how.device, init_scale=how.init_scale, enabled=enabled)


def _autocast_step(
    task: Task, optimizers: list, passes: list[bool], how: How
) -> Callable[[], None]:
    scaler, device, dtype = _scaler(how), how.device, how.dtype

    def step() -> None:
        for loss_of, one in zip(task.losses, optimizers):
            _zero(optimizers)
            for _ in passes:
                with torch.autocast(device, dtype=dtype):
                    loss = loss_of(task.modules)
                scaler.scale(loss).backward()
            scaler.step(one)
            scaler.update()

    return step


def _ampatch_step(task: Task, optimizers: list, passes: list[bool]) -> Callable[[], None]:
    def step() -> None:
        for loss_of, one in zip(task.losses, optimizers):
            _zero(optimizers)
            for more in passes:
                loss = loss_of(task.modules)
                with amp.scale_loss(loss, one, delay_unscale=more) as scaled_loss:
                    scaled_loss.backward()
            one.step()

    return step


PARTS = ("zero_grad", "forward", "enter", "backward", "exit", "step")


def make_parts(task: Task, system: str, how: How) -> Callable[[], Iterator[None]]:
    """A training step that stops after each of `PARTS`; `task` has one optimizer."""
    [model], [loss_of] = task.modules, task.losses
    model.train()
    if engine(system) == HALF:
        _to_half(task, how.dtype)
    optimizer, scaler = how.optimizer(model.parameters()), _scaler(how)
    is_ours, is_scaled = engine(system) in OURS, engine(system) == AUTOCAST
    if is_ours:
        _initialize(task, [optimizer], system, how)

    def step() -> Iterator[None]:
        optimizer.zero_grad()
        yield
        with torch.autocast("cpu", dtype=how.dtype) if is_scaled else contextlib.nullcontext():
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


def make_evaluation(task: Task, system: str, how: How) -> Callable[[], None]:
    """The function that evaluates every module's loss once under `no_grad`."""
    for module in task.modules:
        module.eval()
    around: Callable = contextlib.nullcontext
    if engine(system) == HALF:
        _to_half(task, how.dtype)
    elif engine(system) == AUTOCAST:
        around = functools.partial(torch.autocast, "cpu", dtype=how.dtype)
    elif engine(system) in OURS:
        amp.initialize(task.modules, opt_level=engine(system), dtype=how.dtype, verbosity=0)
        if CACHED in system:
            amp.cached_weights(task.modules).__enter__()  # it lasts as long as the process

    def step() -> None:
        with torch.no_grad(), around():
            for loss_of in task.losses:
                loss_of(task.modules)

    return step


# Situations: each takes the modules of a task, after `initialize`, and gives those to call.

Modules = list[nn.Module]


def hooked(modules: Modules) -> Modules:
    """A hook on every parameter."""
    for parameter in [parameter for module in modules for parameter in module.parameters()]:
        parameter.register_hook(lambda grad: None)
    return modules


def checkpointed(modules: Modules) -> Modules:
    """Activation checkpointing of every layer that has weights; a transformer layer is one."""
    for layer in [layer for module in modules for layer in _layers(module)]:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    return modules


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    whole = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
    if isinstance(module, whole) or not any(True for _ in module.children()):
        if any(True for _ in module.parameters()):
            yield module
        return
    for child in module.children():
        yield from _layers(child)


def distributed(modules: Modules) -> Modules:
    """DistributedDataParallel over gloo, in a process that has the variables of `ranks`."""
    dist.init_process_group("gloo")
    return [nn.parallel.DistributedDataParallel(module) for module in modules]


def ranks() -> list[dict[str, str]]:
    """The variables of each rank's process, as `torchrun` sets them."""
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(any_port.getsockname()[1])}
    return [{**address, "WORLD_SIZE": str(RANKS), "RANK": str(rank)} for rank in range(RANKS)]


SITUATIONS: dict[str, Callable[[Modules], Modules]] = {
    "plain": lambda modules: modules,
    "hooks": hooked,
    "accumulation": lambda modules: modules,  # more passes, not other modules
    "checkpoint": checkpointed,
    "ddp": distributed,
    "compile": lambda modules: modules,  # they are compiled last
}
