"""What `gradients` and `explain` share: options, running the script, printing the answer."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from ampatch.cli.option_types import positive_count
from ampatch.errors import AmpatchError

DEFAULT_STEPS = 20


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
        usage=f"ampatch {name} SCRIPT [options] [-- SCRIPT ARGUMENTS]",
        description=f"{description} The output of SCRIPT goes to the standard error.",
    )
    parser.add_argument("script", metavar="SCRIPT")
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
    from ampatch.launch.script import check_script

    given = {"AMPATCH_OPT_LEVEL": options.opt_level, "AMPATCH_DTYPE": options.dtype}
    try:
        check_script(options.script)
        if options.opt_level is not None:
            environment.opt_level("--opt-level", options.opt_level)
        if options.dtype is not None:
            environment.dtype("--dtype", options.dtype)
        environment.read()
    except (AmpatchError, OSError, ValueError) as error:
        options.parser.error(str(error))
    os.environ.update({name: value for name, value in given.items() if value is not None})


def run_steps(options: argparse.Namespace) -> tuple[int, int]:
    """Run the script; returns the exit code of the command and the optimizer steps taken."""
    from ampatch.diagnose.running import run_watched

    ending, steps = run_watched(options.script, options.arguments, options.steps)
    if ending.exit_code:
        reason = f": {ending.error}" if ending.error else ""
        message = f"{options.script} failed after {steps} optimizer steps{reason}."
    elif steps == options.steps:
        message = f"Ended {options.script} after {steps} optimizer steps (--steps)."
    elif not steps:
        message = f"{options.script} never stepped an optimizer: there is no training to look at."
    else:
        message = ""
    if message:
        print(message, file=sys.stderr)
    return ending.exit_code or (0 if steps else 1), steps


def print_answer(options: argparse.Namespace, answer: Any) -> None:
    """Print an answer as text or, with --json, as JSON."""
    print(json.dumps(answer.as_dict(), indent=2) if options.json else answer)
