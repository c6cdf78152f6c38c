"""Launchers, such as torchrun, that are passed as the script.

A launcher trains nothing itself: it starts other processes without ampatch.  So it has to come
first, and start ampatch in each process.
"""

from __future__ import annotations

from pathlib import Path

from ampatch.launch.program import Program

_TORCHRUN = "torchrun [OPTIONS] -m"
_ACCELERATE = "accelerate launch [OPTIONS] -m"
_LINES = {
    "torchrun": _TORCHRUN,
    "torch.distributed": _TORCHRUN,
    "accelerate": _ACCELERATE,
    "accelerate-launch": _ACCELERATE,
    "deepspeed": "deepspeed [OPTIONS] --module",
    "fabric": _TORCHRUN,  # Lightning's starts scripts only
    "lightning.fabric": _TORCHRUN,
    "lightning_fabric": _TORCHRUN,
}
"""The start of a launcher's line, by its command, its module, or the package of its module."""


def line_of(program: Program) -> str | None:
    """The start of a command line that launches a module, if `program` is a launcher; else None."""
    if not program.is_module:
        return _LINES.get(Path(program.name).name.removesuffix(".exe"))
    within = (line for name, line in _LINES.items() if f"{program.name}.".startswith(f"{name}."))
    return next(within, None)
