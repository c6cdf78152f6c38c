"""The command `ampatch`: sweep, report, compare, run, tables, gradients, explain, doctor, build.

Each subcommand has a file of its own, with `add_parser`.  It imports what it needs
when it runs, so that a wrong option is refused at once.  Exit codes: 0, or 1 when no
run of a sweep went well, or the script's own; 2 for a wrong command line; 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ampatch._version import __version__
from ampatch.cli import build, compare, doctor, explain, gradients, report, run, sweep, tables

# in the order of --help
SUBCOMMANDS = (sweep, report, compare, run, tables, gradients, explain, doctor, build)
WITH_SEPARATOR = ("sweep", "gradients", "explain")
"""Subcommands with `--` between their own arguments and those of the script."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default the process's own; returns the exit code."""
    own, script_arguments = _split(list(sys.argv[1:] if argv is None else argv))
    options, unknown = build_parser().parse_known_args(own)
    if unknown:
        hint = ""
        if own[0] in WITH_SEPARATOR:
            hint = (
                "\nThe script's own arguments go behind --: "
                f"ampatch {own[0]} {options.script} -- {' '.join(unknown)}"
            )
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    options.arguments = script_arguments
    try:
        code: int = options.command(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has ended: `ampatch tables | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The arguments of the command, and those of the script: argparse would mix them.

    The script's arguments begin at `--`, or for `run` after SCRIPT or MODULE.
    """
    if argv[:1] == ["run"]:
        own, rest = run.split(argv[1:])
        return ["run", *own], rest
    if argv and argv[0] in WITH_SEPARATOR and "--" in argv:
        cut = argv.index("--")
        return argv[:cut], argv[cut + 1 :]
    return argv, []


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line, with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="ampatch", description="Automatic mixed precision for PyTorch, by patching it."
    )
    parser.add_argument("--version", action="version", version=f"ampatch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for subcommand in SUBCOMMANDS:
        subcommand.add_parser(commands)
    return parser
