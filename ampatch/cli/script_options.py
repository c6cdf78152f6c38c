"""Shared by the commands that run a script: their options, and which script it is.

`run`, `gradients` and `explain` give the script all that follows it; `sweep` and `tune` have `--`
between their own arguments and the script's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ampatch.cli.option_types import positive_count
from ampatch.errors import AmpatchError

if TYPE_CHECKING:
    from ampatch.launch.program import Program
    from ampatch.launch.run_notes import RunNotes

Options = Mapping[str, dict[str, Any]]
"""The settings of `add_argument`, by the flag."""


def _setting(name: str, metavar: str, words: str) -> dict[str, Any]:
    """An option that sets the variable of the same name, and has the same checks."""

    def check(text: str) -> str:
        from ampatch.config import environment

        try:
            getattr(environment, name)(f"--{name.replace('_', '-')}", text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).partition("=")[2]) from None
        return text

    return {"type": check, "metavar": metavar, "help": f"{words}; sets AMPATCH_{name.upper()}"}


SETTINGS: Options = {
    "--opt-level": _setting("opt_level", "LEVEL", "O0, O1, O2 or O3"),
    "--dtype": _setting("dtype", "DTYPE", "float16 or bfloat16"),
    "--loss-scale": _setting("loss_scale", "SCALE", '"dynamic" or a number'),
    "--overrides": _setting(
        "overrides", "FILE", "JSON file with the precision of modules, as ampatch tune writes it"
    ),
}
"""They replace arguments of the script's `initialize`, by environment variables."""

AUTO: Options = {
    "--auto": {
        "action": "store_true",
        "help": "for a script without AMP code: run it at O1, in float16 or bfloat16. Casts in "
        "modules that have parameters, scales each backward(), checks each step()",
    },
}
DEFAULT_STEPS = 20
STEP_OPTIONS: Options = {
    "--steps": {
        "type": positive_count,
        "default": DEFAULT_STEPS,
        "metavar": "N",
        "help": f"end the script after N optimizer steps (default: {DEFAULT_STEPS})",
    },
    "--json": {"action": "store_true", "help": "print the answer as JSON"},
    **SETTINGS,
    **AUTO,
}
"""For commands that run the script for some steps and print an answer."""


def add_script_command(commands: Any, name: str, options: Options, **texts: str) -> None:
    """Add a command that runs SCRIPT, which gets all that follows it."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        usage=f"ampatch {name} [options] SCRIPT [SCRIPT ARGUMENTS]\n"
        f"       ampatch {name} [options] -m MODULE [SCRIPT ARGUMENTS]",
        allow_abbrev=False,
        **{**texts, "description": f"{texts['description']} Options come before SCRIPT."},
    )
    parser.set_defaults(flags=options)
    for flag, settings in options.items():
        parser.add_argument(flag, **settings)
    add_program(parser)


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add SCRIPT, and `-m MODULE` in its place."""
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m")
    script: Any = parser.add_argument("script", nargs="?", metavar="SCRIPT")
    if (shtab := sys.modules.get("shtab")) is not None:  # it asks for the parsers
        script.complete = shtab.FILE


def split(argv: Sequence[str], with_value: Collection[str]) -> tuple[list[str], list[str]]:
    """The command with its arguments up to SCRIPT or `-m MODULE`, and the script's own after it.

    `with_value` are the options that the next argument belongs to.
    """
    cut = 1
    while cut < len(argv) and argv[cut].startswith("-") and argv[cut] != "-m":
        cut += 2 if argv[cut] in with_value else 1
    cut += 2 if argv[cut : cut + 1] == ["-m"] else 1
    return list(argv[:cut]), list(argv[cut:])


def program_of(options: argparse.Namespace) -> Program:
    """The program to run.  Ends the command if there is none, or two, or if it is a launcher."""
    from ampatch.launch import launchers
    from ampatch.launch.program import Program

    parser: argparse.ArgumentParser = options.parser
    if options.script is None and options.module is None:
        parser.error("the following arguments are required: SCRIPT")
    if options.script is not None and options.module is not None:
        parser.error(
            f"SCRIPT ({options.script}) and -m {options.module}: expected one of them. "
            "Put -- before the arguments of MODULE."
        )
    program = Program(options.module or options.script or "", options.module is not None)
    if not program.name:
        parser.error(
            "the name of the script is empty: an unset variable? Expected SCRIPT, the path of a "
            "Python file, or -m MODULE."
        )
    line = launchers.launch_command_of(program)
    if line is not None:
        expected = "the script that it starts; ampatch sweep has --nproc-per-node"
        if parser.prog == "ampatch run":
            expected = f"the launcher first: {line} ampatch run SCRIPT"
        parser.error(
            f"{program}: it starts other processes, which {parser.prog} does not see.\n"
            f"Expected {expected}."
        )
    return program


def settings_on_command_line(options: argparse.Namespace) -> dict[str, str]:
    """The values of SETTINGS on the command line, by the flag."""
    values = {flag: getattr(options, flag[2:].replace("-", "_")) for flag in SETTINGS}
    return {flag: text for flag, text in values.items() if text is not None}


def apply_settings(options: argparse.Namespace, program: Program) -> None:
    """Set the variables of SETTINGS; errors in them or the program end the command."""
    from ampatch.launch import children

    for flag, text in settings_on_command_line(options).items():
        os.environ[f"AMPATCH_{flag[2:].replace('-', '_').upper()}"] = text
    try:
        children.check_environment(options.auto)
        program.file()
    except (AmpatchError, ImportError, OSError, ValueError) as error:
        options.parser.error(str(error))


def start(options: argparse.Namespace, program: Program) -> RunNotes:
    """Set this process up for the script; returns the observer that prints lines about it."""
    from ampatch.config import environment
    from ampatch.launch import children
    from ampatch.launch.run_notes import RunNotes

    _say_misplaced(options, program.file().read_text(errors="replace"))
    settings = settings_on_command_line(options)
    if environment.read().get("opt_level") == "O0":
        settings.pop("--opt-level", None)  # a script without `initialize` is in FP32 as it is
    notes = RunNotes(options.parser.prog, program, settings, options.auto)
    children.start(options.auto, notes.record_child)
    return notes


def _say_misplaced(options: argparse.Namespace, source: str) -> None:
    """Print a line if options of ampatch stand after SCRIPT and are not in the script's source."""
    misplaced, remaining = [], []
    words = iter(options.arguments)
    for word in words:
        flag, sign, _ = word.partition("=")
        if flag in options.flags and flag not in source:
            has_value = not sign and "action" not in options.flags[flag]
            misplaced += [word, *itertools.islice(words, int(has_value))]
        else:
            remaining.append(word)
    if misplaced and os.environ.get("RANK", "0") == "0":
        command, *before = options.argv[: len(options.argv) - len(options.arguments)]
        right = shlex.join([command, *misplaced, *before, *remaining])
        print(
            f"{options.parser.prog}: {shlex.join(misplaced)} went to the script. Options of "
            f"ampatch come before it: ampatch {right}",
            file=sys.stderr,
        )


def run_watched(options: argparse.Namespace, watcher: Callable[[], Any]) -> tuple[int, int, Any]:
    """Run the script under `watcher()`; returns exit code, optimizer steps, and the watch."""
    program = program_of(options)
    apply_settings(options, program)
    notes = start(options, program)
    from ampatch.diagnose.run_steps import run_steps

    watch = watcher()
    ending, steps = run_steps(program, options.arguments, options.steps)
    watch.remove()
    notes.close()
    if ending.exit_code:
        reason = f": {ending.error}" if ending.error else ""
        message = f"{program} failed after {steps} optimizer steps{reason}."
    elif steps == options.steps:
        message = f"Ended {program} after {steps} optimizer steps (--steps)."
    else:
        reason = f"{program} never stepped an optimizer: there is no training to look at."
        message = "" if steps else reason
    if message:
        print(message, file=sys.stderr)
    if steps and not ending.exit_code and notes.print_if_unused():
        options.parser.exit(1)
    return ending.exit_code or (0 if steps else 1), steps, watch


def print_answer(options: argparse.Namespace, answer: Any) -> None:
    """Print an answer as text or, with --json, as JSON."""
    print(json.dumps(answer.as_dict(), indent=2) if options.json else answer)
