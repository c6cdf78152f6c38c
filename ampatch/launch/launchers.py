"""Launchers, such as torchrun, that are given as the script.

A launcher trains nothing itself: it starts other processes, in which there is no ampatch.  So it
has to come first, and start ampatch in each process.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ampatch.launch.program import Program

_COMMANDS = ("torchrun", "deepspeed", "accelerate")
_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
    "deepspeed.launcher.runner",
)
_WITH_SUBCOMMAND = ("accelerate", "accelerate.commands.accelerate_cli")  # only `launch` launches
_MODULE = ("-m", "--module")  # what the launchers' own option for a module is called


def put_first(program: Program, arguments: Sequence[str], command: Sequence[str]) -> str | None:
    """The command line with the launcher first, if `program` is one; else None.

    `command` is the one of ampatch with its options: `["run", "--auto"]`.
    """
    launcher = _launcher(program)
    if launcher is None or (launcher in _WITH_SUBCOMMAND and arguments[:1] != ["launch"]):
        return None
    start = ["python", "-m", launcher] if launcher in _MODULES else [program.name]
    head, trained = _split(arguments)
    flag = "--module" if launcher.startswith("deepspeed") else "-m"
    return shlex.join([*start, *head, flag, "ampatch", *command, *trained])


def trained_by(arguments: Sequence[str]) -> list[str]:
    """The words of a launcher's arguments from the script, or `-m MODULE`, on."""
    return _split(arguments)[1]


def _launcher(program: Program) -> str | None:
    """The name of the command or module, if it is a launcher's."""
    if program.is_module:
        return program.name if program.name in _MODULES else None
    path = Path(program.name)
    if path.suffix == ".py":  # torch/distributed/run.py by its path
        module = ".".join(path.with_suffix("").parts[-3:])
        return module if module in _MODULES else None
    command = path.name.removesuffix(".exe")
    return command if command in _COMMANDS else None


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher's own arguments; and what it starts with its arguments, `SCRIPT` if unknown."""
    for at, word in enumerate(arguments):
        module = arguments[at + 1 : at + 2]
        if word in _MODULE and module and not module[0].startswith("-"):
            return list(arguments[:at]), ["-m", *arguments[at + 1 :]]
        if word.endswith(".py") and not word.startswith("-"):
            return list(arguments[:at]), list(arguments[at:])
    return list(arguments), ["SCRIPT"]
