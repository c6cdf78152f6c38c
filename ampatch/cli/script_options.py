"""What commands share that run a script: naming it, and what `gradients` and `explain` need."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ampatch.cli.option_types import positive_count
from ampatch.errors import AmpatchError

if TYPE_CHECKING:
    from ampatch.launch.program import Program

DEFAULT_STEPS = 20
_WITH_VALUE = (
    *("--opt-level", "--dtype", "--loss-scale", "--overrides", "--stop-at"),
    *("--steps", "--lost", "--plot"),
)
"""Options of the commands that take what follows SCRIPT as the script's."""


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments up to SCRIPT or `-m MODULE`, and the script's own after it."""
    cut = 0
    while cut < len(argv) and argv[cut].startswith("-") and argv[cut] != "-m":
        cut += 2 if argv[cut] in _WITH_VALUE else 1
    cut += 2 if argv[cut : cut + 1] == ["-m"] else 1
    return list(argv[:cut]), list(argv[cut:])


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add SCRIPT, and `-m MODULE` in its place."""
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m")
    parser.add_argument("script", nargs="?", metavar="SCRIPT")


def program_of(options: argparse.Namespace) -> Program:
    """What is to run.  One that is not given, or given twice, ends the command."""
    from ampatch.launch.program import Program

    if options.script is None and options.module is None:
        options.parser.error("the following arguments are required: SCRIPT")
    if options.script is not None and options.module is not None:
        options.parser.error(
            f"SCRIPT ({options.script}) and -m {options.module}: expected one of them. The "
            "arguments of MODULE go behind --."
        )
    return Program(options.script or options.module, options.module is not None)


def refuse_launcher(options: argparse.Namespace, program: Program, advice: str = "") -> None:
    """End the command if what it is to run is a launcher; `advice` follows `ampatch COMMAND`."""
    from ampatch.launch import launchers

    if launchers.put_first(program, options.arguments, ()) is None:
        return
    command = options.parser.prog
    script = shlex.join(launchers.trained_by(program, options.arguments))
    options.parser.error(
        f"{program}: it starts other processes, which {command} does not see.\nExpected the script "
        f"that it starts: {command} {script}{advice}"
    )


def add_script_command(
    commands: Any,
    name: str,
    title: str,
    description: str,
    command: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """Add a command that runs SCRIPT for some optimizer steps and prints an answer."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=title,
        usage=f"ampatch {name} [options] SCRIPT [SCRIPT ARGUMENTS]\n"
        f"       ampatch {name} [options] -m MODULE [SCRIPT ARGUMENTS]",
        description=f"{description} The output of SCRIPT goes to the standard error. Options come "
        "before SCRIPT.",
        allow_abbrev=False,
    )
    add_program(parser)
    parser.add_argument(
        "--steps",
        type=positive_count,
        default=DEFAULT_STEPS,
        metavar="N",
        help=f"end the script after N optimizer steps (default: {DEFAULT_STEPS})",
    )
    parser.add_argument("--opt-level", metavar="LEVEL", help="sets AMPATCH_OPT_LEVEL")
    parser.add_argument("--dtype", help="sets AMPATCH_DTYPE: float16 or bfloat16")
    parser.add_argument("--json", action="store_true", help="the answer as JSON")
    parser.set_defaults(command=command, parser=parser)
    return parser


def apply_settings(options: argparse.Namespace) -> None:
    """Check script and settings, then set the variables; a wrong one ends the command."""
    from ampatch.config import environment

    options.program = program_of(options)
    refuse_launcher(options, options.program)
    given = {"AMPATCH_OPT_LEVEL": options.opt_level, "AMPATCH_DTYPE": options.dtype}
    try:
        options.program.file()
        if options.opt_level is not None:
            environment.opt_level("--opt-level", options.opt_level)
        if options.dtype is not None:
            environment.dtype("--dtype", options.dtype)
        environment.read()
    except (AmpatchError, ImportError, OSError, ValueError) as error:
        options.parser.error(str(error))
    os.environ.update({name: value for name, value in given.items() if value is not None})


def run_steps(options: argparse.Namespace) -> tuple[int, int]:
    """Run the script; returns the exit code of the command and the optimizer steps taken."""
    from ampatch.diagnose.running import run_watched

    program = options.program
    ending, steps = run_watched(program, options.arguments, options.steps)
    if ending.exit_code:
        reason = f": {ending.error}" if ending.error else ""
        message = f"{program} failed after {steps} optimizer steps{reason}."
    elif steps == options.steps:
        message = f"Ended {program} after {steps} optimizer steps (--steps)."
    elif not steps:
        message = f"{program} never stepped an optimizer: there is no training to look at."
    else:
        message = ""
    if message:
        print(message, file=sys.stderr)
    return ending.exit_code or (0 if steps else 1), steps


def print_answer(options: argparse.Namespace, answer: Any) -> None:
    """Print an answer as text or, with --json, as JSON."""
    print(json.dumps(answer.as_dict(), indent=2) if options.json else answer)
