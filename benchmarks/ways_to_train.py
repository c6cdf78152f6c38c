"""What a training step may stand in: hooks, checkpoints, DistributedDataParallel, torch.compile.

Each takes the modules of a task, after `initialize`, and gives those that the losses call.
"""

from __future__ import annotations

import functools
import shutil
import socket
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

MICRO_BATCHES = 4
RANKS = 2
COMPILER = "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"

Modules = list[nn.Module]


def plain(modules: Modules) -> Modules:
    """Nothing besides."""
    return modules


def hooked(modules: Modules) -> Modules:
    """A hook on every parameter."""
    for module in modules:
        for parameter in module.parameters():
            parameter.register_hook(lambda grad: None)
    return modules


def checkpointed(modules: Modules) -> Modules:
    """Activation checkpointing of every layer that has weights; a transformer layer is one."""
    for module in modules:
        for layer in _layers(module):
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


def compiled(modules: Modules) -> Modules:
    """Each module compiled, by inductor where there is a C++ compiler."""
    return [torch.compile(module, backend=COMPILER) for module in modules]


SITUATIONS = {
    "plain": plain,
    "hooks": hooked,
    "accumulation": plain,  # more passes, not other modules
    "checkpoint": checkpointed,
    "ddp": distributed,
    "compile": compiled,
}
