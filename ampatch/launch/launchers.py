"""Launchers, such as torchrun, that are given as the script.

A launcher trains nothing itself: it starts other processes, in which there is no ampatch.  So it
has to come first, and start ampatch in each process.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ampatch.launch.program import Program

_TORCHRUN = "torchrun [OPTIONS] -m"
_ACCELERATE = "accelerate launch [OPTIONS] -m"
_DEEPSPEED = "deepspeed [OPTIONS] --module"
_FIRST = {
    "torchrun": _TORCHRUN,
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": "python -m torch.distributed.launch [OPTIONS] -m",
    "accelerate launch": _ACCELERATE,
    "accelerate-launch": _ACCELERATE,
    "accelerate.commands.launch": _ACCELERATE,
    "accelerate.commands.accelerate_cli launch": _ACCELERATE,
    "deepspeed": _DEEPSPEED,
    "deepspeed.launcher.runner": _DEEPSPEED,
    "fabric run": _TORCHRUN,  # Lightning's starts scripts only
    "lightning.fabric.cli run": _TORCHRUN,
    "lightning_fabric.cli run": _TORCHRUN,
}
"""How a launcher's line begins, by its command or module, with its subcommand."""


def put_first(program: Program, arguments: Sequence[str], command: Sequence[str]) -> str | None:
    """The command line with the launcher first, if `program` is one; else None.

    `command` is the one of ampatch with its options: `["run", "--auto"]`.
    """
    names = [program.name]
    if not program.is_module:
        places = Path(program.name), Path(program.name).resolve()  # it may be a link to one
        names = [place.name.removesuffix(".exe") for place in places]
        # torch/distributed/run.py by its path
        names += [".".join(p.with_suffix("").parts[-3:]) for p in places if p.suffix == ".py"]
    for name in (*names, *(f"{name} {first}" for name in names for first in arguments[:1])):
        if name in _FIRST:
            return f"{_FIRST[name]} {shlex.join(['ampatch', *command])} SCRIPT [ARGUMENTS]"
    return None
