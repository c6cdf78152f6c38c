"""The command `ampatch`: sweep, tune, report, run, apex-path, tables, gradients, explain, doctor
and build.

Each subcommand has a file of its own, with `add_parser`.  It imports what it needs
when it runs, so that a wrong option is refused at once.  `exit_codes` has what each
one's help says of its exit code.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import sys
from collections import Counter
from collections.abc import Sequence

from ampatch._version import __version__
from ampatch.cli import (
    apex_path,
    build,
    doctor,
    explain,
    gradients,
    report,
    run,
    sweep,
    tables,
    tune,
)
from ampatch.cli.ending import end_quietly
from ampatch.cli.exit_codes import OF_ALL, exit_status
from ampatch.cli.script_options import split
from ampatch.errors import did_you_mean

# in the order of --help; each file has the name of its command
SUBCOMMANDS = (sweep, tune, report, run, apex_path, tables, gradients, explain, doctor, build)
NAMES = tuple(one.__name__.rpartition(".")[2].replace("_", "-") for one in SUBCOMMANDS)
WITH_SEPARATOR = ("sweep", "tune")
"""Subcommands with `--` between their own arguments and those of the script."""
WITH_SCRIPT_LAST = ("run", "gradients", "explain")
"""Subcommands that give the script all that follows it."""
_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default the process's own; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    name = f"ampatch {given[0]}" if given and given[0] in NAMES else "ampatch"
    return end_quietly(lambda: _run(given), name)


def _run(argv: list[str]) -> int:
    own, script_arguments = _split(argv)
    parser = build_parser()
    _check_command(parser, own)
    options, unknown = parser.parse_known_args(own)
    if unknown:
        options.parser.error(_unrecognized(own, options, unknown))
    options.own, options.arguments, options.given = own, script_arguments, argv
    code: int = options.command(options)
    return code


def _check_command(parser: argparse.ArgumentParser, own: list[str]) -> None:
    """Refuse a command that there is not, with the one that was meant."""
    if not own or own[0].startswith("-") or own[0] in NAMES:
        return
    meant = did_you_mean(own[0], NAMES)
    if own[0].endswith(".py"):
        meant = f" To run a script: ampatch run {own[0]}"
    parser.error(f"there is no command {own[0]!r}.{meant}\nExpected one of {', '.join(NAMES)}.")


def _unrecognized(own: list[str], options: argparse.Namespace, unknown: list[str]) -> str:
    command = own[0]
    known = re.findall(r"--[\w-]+", options.parser.format_help())
    meant = did_you_mean(unknown[0].partition("=")[0], known) if unknown[0][:2] == "--" else ""
    message = f"unrecognized arguments: {' '.join(unknown)}.{meant}"
    if command in WITH_SEPARATOR:
        program = [options.script or "SCRIPT"]
        if options.module:  # SCRIPT is then an argument of the module, or the value of one
            program, unknown = ["-m", options.module], [*unknown, *filter(None, [options.script])]
        of_script = _as_given(unknown, own)
        message += (
            "\nThe script's own arguments go behind --: "
            f"ampatch {command} {shlex.join(program)} -- {shlex.join(of_script)}"
        )
    return message


def _as_given(words: list[str], given: list[str]) -> list[str]:
    """The words in their order among those `given`."""
    left, found = Counter(words), []
    for word in reversed(given):
        if left[word]:
            left[word] -= 1
            found.append(word)
    return found[::-1]


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The arguments of the command, and those of the script: argparse would mix them.

    The script's arguments begin at `--`, or, as for `run`, after SCRIPT or MODULE.
    `--local-rank=N` is the script's, wherever it stands: `python -m torch.distributed.launch -m
    ampatch run ...` puts it in front of `run`.
    """
    rest = list(itertools.dropwhile(_LOCAL_RANK.fullmatch, argv))
    if rest and rest[0] in (*WITH_SCRIPT_LAST, *WITH_SEPARATOR):
        own, of_script = _split_of_command(rest)
        ranks = [*argv[: len(argv) - len(rest)], *filter(_LOCAL_RANK.fullmatch, own)]
        return [word for word in own if word not in ranks], [*ranks, *of_script]
    return argv, []


def _split_of_command(argv: list[str]) -> tuple[list[str], list[str]]:
    if argv[0] in WITH_SCRIPT_LAST:
        own, rest = split(argv[1:])
        return [argv[0], *own], rest
    if "--" in argv:
        cut = argv.index("--")
        return argv[:cut], argv[cut + 1 :]
    return argv, []


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line, with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="ampatch",
        description="Automatic mixed precision for PyTorch, by patching it.",
        epilog=f"Exit status: that of the command, see COMMAND --help; {OF_ALL}.",
    )
    parser.add_argument("--version", action="version", version=f"ampatch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for subcommand in SUBCOMMANDS:
        subcommand.add_parser(commands)
    for name, command in commands.choices.items():
        command.epilog = " ".join(filter(None, [command.epilog, exit_status(name)]))
    return parser
