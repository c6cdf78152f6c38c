"""The command `ampatch` and its subcommands.

Each subcommand has a file: `add_parser` adds it to the subparsers, `run` returns the exit code.
`run` imports what it needs, so that a wrong option is refused without these imports.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import sys
from collections.abc import Iterable, Sequence

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
from ampatch.cli.script_options import STEP_OPTIONS, split
from ampatch.errors import did_you_mean

# In the order of --help.  Each file has the name of its command.
SUBCOMMANDS = (sweep, tune, report, run, apex_path, tables, gradients, explain, doctor, build)
NAMES = tuple(module.__name__.rpartition(".")[2].replace("_", "-") for module in SUBCOMMANDS)
WITH_SEPARATOR = ("sweep", "tune")
"""Subcommands with `--` between their own arguments and the script's arguments."""
WITH_SCRIPT_LAST = {"run": run.OPTIONS, "gradients": gradients.OPTIONS, "explain": STEP_OPTIONS}
"""Subcommands that pass everything after the script to the script, with their own options."""
_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")

_COMMON_CODES = "2 for a wrong command line; 130 after Ctrl-C; 141 if the output is a closed pipe"
_CODES_WITH_SCRIPT = "0; 1 if no optimizer stepped; the status of the script if it failed"
_EXIT_CODES = {
    "sweep": "0; 1 if no run succeeded or the sweep could not continue; 143 after SIGTERM",
    "tune": "0; 1 if no cure was found or the tuning could not continue; 143 after SIGTERM",
    "report": "0; 1 if a file cannot be written",
    "run": "the script's own; 1 if an exception or --debug ends it",
    "tables": "0; 1 if no row has NAME",
    "gradients": _CODES_WITH_SCRIPT,
    "explain": _CODES_WITH_SCRIPT,
    "doctor": "0; 1 if torch cannot be imported",
    "build": "0 if there is a build that loads, or after --clean; 1 if it cannot be made or does "
    "not load",
}
"""The exit codes of a command, for its help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default the process's own; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    name = f"ampatch {words[0]}" if words and words[0] in NAMES else "ampatch"
    return end_quietly(lambda: _run(words), name)


def _run(argv: list[str]) -> int:
    arguments, script_arguments = _split_arguments(argv)
    parser = build_parser()
    _check_command(parser, arguments)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        options.parser.error(_unrecognized_message(arguments, options, unknown))
    options.arguments, options.argv = script_arguments, argv
    return int(options.command(options))


def _check_command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Refuse an unknown command or option, and name a similar one."""
    word = arguments[0]
    if word in ("-h", "--help", "--version", *NAMES):
        return
    if word.startswith("-"):
        meant = _similar_option(word, {"help", "version"}) or " Options of a command come after it."
        parser.error(f"unrecognized arguments: {word}.{meant}")
    meant = did_you_mean(word, NAMES)
    if word.endswith(".py"):
        meant = f" To run a script: ampatch run {word}"
    parser.error(f"there is no command {word!r}.{meant}\nExpected one of {', '.join(NAMES)}.")


def _similar_option(word: str, known: Iterable[str]) -> str:
    name = word.partition("=")[0].lstrip("-")
    return did_you_mean(name, known, 0.75).replace('"', '"--', 1)


def _unrecognized_message(words: list[str], options: argparse.Namespace, unknown: list[str]) -> str:
    known = {*re.findall(r"--([\w-]+)", options.parser.format_help())} - {"help"}
    meant = _similar_option(unknown[0], known) if unknown[0].startswith("-") else ""
    message = f"unrecognized arguments: {' '.join(unknown)}.{meant}"
    if words[0] in WITH_SEPARATOR:
        remaining, recognized = list(unknown), []
        for word in words:
            if remaining[:1] == [word]:
                remaining.pop(0)
            else:
                recognized.append(word)
        follows_script = {"-m", options.script}.intersection(words[: words.index(unknown[0])])
        line = shlex.join([*recognized, "--", *unknown]) if follows_script else ""
        message += "\nPut -- before the script's own arguments: ampatch "
        message += line or f"{words[0]} SCRIPT -- ARGUMENTS"
    return message


def _split_arguments(argv: list[str]) -> tuple[list[str], list[str]]:
    """The arguments of the command, and the arguments of the script: argparse would mix them.

    The script's arguments begin at `--` or, as for `run`, after SCRIPT or MODULE.
    `--local-rank=N` is the script's, wherever it stands: `python -m torch.distributed.launch -m
    ampatch run ...` puts it in front of `run`.
    """
    rest = list(itertools.dropwhile(_LOCAL_RANK.fullmatch, argv))
    if not rest or rest[0] not in (*WITH_SCRIPT_LAST, *WITH_SEPARATOR):
        return argv, []
    if rest[0] in WITH_SCRIPT_LAST:
        options = WITH_SCRIPT_LAST[rest[0]]
        with_value = [flag for flag, settings in options.items() if "action" not in settings]
        arguments, script_arguments = split(rest, with_value)
    else:
        cut = rest.index("--") if "--" in rest else len(rest)
        arguments, script_arguments = rest[:cut], rest[cut + 1 :]
    rank_flags = [*argv[: len(argv) - len(rest)], *filter(_LOCAL_RANK.fullmatch, arguments)]
    arguments = [word for word in arguments if word not in rank_flags]
    return arguments, [*rank_flags, *script_arguments]


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line, with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="ampatch",
        description="Apex-style automatic mixed precision for PyTorch.",
        epilog=f"Exit status: see COMMAND --help; {_COMMON_CODES}.",
    )
    parser.add_argument("--version", action="version", version=f"ampatch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for subcommand in SUBCOMMANDS:
        subcommand.add_parser(commands)
    for subcommand, (name, command) in zip(SUBCOMMANDS, commands.choices.items(), strict=True):
        codes = f"Exit status: {_EXIT_CODES.get(name, '0; 1 if it fails')}; {_COMMON_CODES}."
        command.epilog = f"{command.epilog} {codes}" if command.epilog else codes
        command.set_defaults(command=subcommand.run, parser=command)
    return parser
