"""The command `ampatch`: sweep, report, run, tables, gradients, explain, doctor.

What a subcommand needs is imported when it runs, so that a wrong option is
refused at once.  Exit codes: 0, or 1 when no run of a sweep went well, or the
script's own; 2 for a wrong command line; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from ampatch._version import __version__
from ampatch.cli import diagnose, report, run, sweep


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default the process's own; returns the exit code."""
    own, script_arguments = _split(list(sys.argv[1:] if argv is None else argv))
    options, unknown = build_parser().parse_known_args(own)
    if unknown:
        hint = ""
        if own[0] in ("sweep", "gradients", "explain"):
            hint = (
                "\nThe script's own arguments go behind --: "
                f"ampatch {own[0]} {options.script} -- {' '.join(unknown)}"
            )
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    options.arguments = script_arguments
    try:
        code = options.command(options)
        sys.stdout.flush()
    except BrokenPipeError:  # who read our output has seen enough: `ampatch tables | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What is for us, and what is for the script: argparse would mix the two.

    Behind `sweep`, `gradients` and `explain` the script's part begins at `--`, behind `run` after
    SCRIPT or MODULE.
    """
    if argv[:1] in (["sweep"], ["gradients"], ["explain"]) and "--" in argv:
        cut = argv.index("--")
        return argv[:cut], argv[cut + 1 :]
    if argv[:1] == ["run"]:
        own, rest = run.split(argv[1:])
        return ["run", *own], rest
    return argv, []


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ampatch", description="Automatic mixed precision for PyTorch, by patching it."
    )
    parser.add_argument("--version", action="version", version=f"ampatch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    sweep.add_to(commands)
    report.add_to(commands)
    run.add_parser(commands)
    _add_tables(commands)
    diagnose.add_parsers(commands)
    return parser


def _add_tables(commands: Any) -> None:
    parser = commands.add_parser(
        "tables",
        help="which function gets which dtype, and why",
        description="Prints what is patched, where, by which rule and why, what this torch lacks "
        "of it, and where torch.autocast for CUDA and apex differ.",
        epilog="Exit status: 0; 1 where no row names NAME, or --check finds a function out of "
        "reach; 2 for a wrong command line or a MODULE that cannot be imported.",
    )
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="only functions with this in their name, or that match it: 'torch.linalg.*'",
    )
    parser.add_argument("--rule", help="only the rows with this rule, such as half or float")
    parser.add_argument(
        "--format",
        choices=("text", "markdown", "json"),
        default="text",
        help="markdown is docs/op_tables.md (default: text)",
    )
    parser.add_argument(
        "--check",
        metavar="MODULE",
        help="import a module or a .py file and name each patched function that it holds from "
        "before the patches: what is rebound, what is out of reach and how to write it",
    )
    parser.set_defaults(command=tables_command, parser=parser)


# tables


def tables_command(options: argparse.Namespace) -> int:
    from ampatch.cli.tables import run

    return run(options)
