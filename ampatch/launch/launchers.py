"""Launchers, such as torchrun, that are given as the script.

A launcher trains nothing itself: it starts other processes, in which there is no ampatch.  So it
has to come first, and start ampatch in each process.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ampatch.launch.program import Program


@dataclass(frozen=True)
class _Launcher:
    """How one starts others: `subcommand`, if it has some; `module`, its option for a module."""

    subcommand: str | None = None
    module: str | None = "-m"


_COMMANDS = {
    "torchrun": _Launcher(),
    "deepspeed": _Launcher(module="--module"),
    "accelerate": _Launcher("launch"),
    "accelerate-launch": _Launcher(),
    "fabric": _Launcher("run", module=None),  # starts scripts only
}
_MODULES = {
    "torch.distributed.run": _Launcher(),
    "torch.distributed.launch": _Launcher(),
    "accelerate.commands.launch": _Launcher(),
    "accelerate.commands.accelerate_cli": _Launcher("launch"),
    "deepspeed.launcher.runner": _Launcher(module="--module"),
    "lightning.fabric.cli": _Launcher("run", module=None),
    "lightning_fabric.cli": _Launcher("run", module=None),
}
_MODULE = ("-m", "--module")  # what the launchers' own option for a module is called
_NO_SCRIPT = {"--", "-h", "--help", "--version", "--no-python", "--no_python", "--run-path"}
"""With these options a launcher starts no Python script, or finds it in another way."""


def put_first(program: Program, arguments: Sequence[str], command: Sequence[str]) -> str | None:
    """The command line with the launcher first, if `program` is one; else None.

    `command` is the one of ampatch with its options: `["run", "--auto"]`.  Where the script is
    not known for certain, the line has none of `arguments`.
    """
    name, launcher = _launcher(program)
    if launcher is None or (launcher.subcommand and arguments[:1] != [launcher.subcommand]):
        return None
    ampatch = shlex.join(["ampatch", *command])
    if launcher.module is None:
        return f"torchrun [OPTIONS] -m {ampatch} SCRIPT [ARGUMENTS]"
    start = ["python", "-m", name] if name in _MODULES else [program.name]
    start += filter(None, [launcher.subcommand])
    head, trained, rest = _split(arguments[1:] if launcher.subcommand else arguments)
    if not trained:
        return f"{shlex.join(start)} [OPTIONS] {launcher.module} {ampatch} SCRIPT [ARGUMENTS]"
    own = shlex.join([*start, *head, launcher.module])
    return f"{own} {ampatch} {shlex.join([*trained, *rest])}"


def trained_by(program: Program, arguments: Sequence[str]) -> list[str]:
    """What the launcher starts: a script, or `-m MODULE`; `SCRIPT` if it is not certain."""
    launcher = _launcher(program)[1]
    has_subcommand = launcher is not None and launcher.subcommand is not None
    return _split(arguments[1:] if has_subcommand else arguments)[1] or ["SCRIPT"]


def _launcher(program: Program) -> tuple[str, _Launcher | None]:
    """The name of the command or module, and what it is if it is a launcher's."""
    if program.is_module:
        return program.name, _MODULES.get(program.name)
    given = Path(program.name)
    for path in (given, given.resolve()):  # which may be a link to one
        if path.suffix == ".py":  # torch/distributed/run.py by its path
            name = ".".join(path.with_suffix("").parts[-3:])
            if name in _MODULES:
                return name, _MODULES[name]
        name = path.name.removesuffix(".exe")
        if name in _COMMANDS:
            return name, _COMMANDS[name]
    return program.name, None


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The launcher's own options; the script or `-m MODULE` that it starts; and the rest.

    The second is empty where it is not certain: in `--standalone tool data.py` the script may be
    `tool`.
    """
    words = list(arguments)
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in _NO_SCRIPT:
        following = words[at + 1 : at + 2]
        has_bare = bool(following) and not following[0].startswith("-")
        if words[at] in _MODULE:
            return (words[:at], ["-m", *following], words[at + 2 :]) if has_bare else ([], [], [])
        is_value = has_bare and "=" not in words[at] and not _is_script(following[0])
        at += 2 if is_value else 1
    if at < len(words) and words[at].endswith(".py"):
        return words[:at], [words[at]], words[at + 1 :]
    return [], [], []


def _is_script(word: str) -> bool:
    """Whether it is no option's value, but may be what is started."""
    path = Path(word)
    return path.suffix == ".py" or (not path.suffix and path.is_file())
