"""Launchers, such as torchrun, that the user passes as the script.

A launcher trains nothing itself: it starts other processes, without ampatch.  So the user has to
start the launcher, and the launcher has to start ampatch in each process.
"""

from __future__ import annotations

from pathlib import Path

from ampatch.launch.program import Program

_TORCHRUN = "torchrun [OPTIONS] -m"
_ACCELERATE = "accelerate launch [OPTIONS] -m"
_LAUNCH_COMMANDS = {
    "torchrun": _TORCHRUN,
    "torch.distributed": _TORCHRUN,
    "accelerate": _ACCELERATE,
    "accelerate-launch": _ACCELERATE,
    "deepspeed": "deepspeed [OPTIONS] --module",
    "fabric": _TORCHRUN,  # Lightning's starts scripts only
    "lightning.fabric": _TORCHRUN,
    "lightning_fabric": _TORCHRUN,
}
"""The start of a launcher's command line, by its command, its module, or its module's package."""


def launch_command_of(program: Program) -> str | None:
    """Return the start of a command line that launches a module, or None for no launcher."""
    if not program.is_module:
        return _LAUNCH_COMMANDS.get(Path(program.name).name.removesuffix(".exe"))
    within = (
        line for name, line in _LAUNCH_COMMANDS.items() if f"{program.name}.".startswith(f"{name}.")
    )
    return next(within, None)
