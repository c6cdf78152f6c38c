"""The command `ampatch run`: its options, and what is set up before the script starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ampatch.cli import native_first
from ampatch.cli.debugging import run_debugged
from ampatch.cli.script_options import add_program, program_of
from ampatch.errors import AmpatchError

if TYPE_CHECKING:
    from ampatch.launch.program import Program

_VARIABLE = {
    "--opt-level": "AMPATCH_OPT_LEVEL",
    "--dtype": "AMPATCH_DTYPE",
    "--loss-scale": "AMPATCH_LOSS_SCALE",
    "--overrides": "AMPATCH_OVERRIDES",
}


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = commands.add_parser(
        "run",
        help="run one script at a given opt level",
        usage="ampatch run [options] SCRIPT [SCRIPT ARGUMENTS]\n"
        "       ampatch run [options] -m MODULE [SCRIPT ARGUMENTS]",
        description="Runs SCRIPT as Python would. These options replace the arguments of its "
        "initialize; with --auto a script without AMP code runs in mixed precision. `from apex "
        "import amp` finds ampatch, unless an apex that has amp is installed. Options come before "
        "SCRIPT.",
        epilog="Under torchrun: torchrun --nproc-per-node 2 -m ampatch run SCRIPT.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--opt-level",
        type=_option("opt_level"),
        metavar="LEVEL",
        help="O0, O1, O2 or O3; sets AMPATCH_OPT_LEVEL",
    )
    parser.add_argument(
        "--dtype", type=_option("dtype"), help="float16 or bfloat16; sets AMPATCH_DTYPE"
    )
    parser.add_argument(
        "--loss-scale",
        type=_option("loss_scale"),
        metavar="SCALE",
        help='"dynamic" or a number; sets AMPATCH_LOSS_SCALE',
    )
    parser.add_argument(
        "--overrides",
        type=_option("overrides"),
        metavar="FILE",
        help="modules in another precision, a JSON file as ampatch tune writes it; sets "
        "AMPATCH_OVERRIDES",
    )
    parser.add_argument(
        "--auto",
        action="store_true",
        help="for a script without AMP code: cast torch's functions, scale each backward(), "
        "check each step(); at O1, in float16 or bfloat16",
    )
    parser.add_argument(
        "--debug",
        action="store_true",
        help="say where the first inf or NaN comes from: operator, module, line; the script ends "
        "there (slow)",
    )
    parser.add_argument(
        "--stop-at",
        choices=("unabsorbed", "any"),
        help="what --debug stops at: what the dynamic loss scale does not absorb, or any inf or "
        "NaN (default: unabsorbed)",
    )
    add_program(parser)
    parser.set_defaults(command=run, parser=parser)


def _option(name: str) -> Callable[[str], str]:
    """A type of option: text that is checked like the variable of the same name."""

    def check(text: str) -> str:
        from ampatch.config import environment

        try:
            getattr(environment, name)(f"--{name.replace('_', '-')}", text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).partition("=")[2]) from None
        return text

    return check


def run(options: argparse.Namespace) -> int:
    """Run the script or module; returns its exit code."""
    program = program_of(options)
    if options.stop_at is not None and not options.debug:
        options.parser.error("--stop-at goes with --debug")
    from ampatch.launch import children, launchers
    from ampatch.launch.script import check_script

    own = options.own[: -len(program.words)]
    launched = launchers.put_first(program, options.arguments, own)
    if launched is not None:
        options.parser.error(
            f"{program}: it starts other processes, in which there would be no ampatch.\n"
            f"Expected the launcher first: {launched}"
        )
    given = {
        "--opt-level": options.opt_level,
        "--dtype": options.dtype,
        "--loss-scale": options.loss_scale,
        "--overrides": options.overrides,
    }
    os.environ.update({_VARIABLE[name]: text for name, text in given.items() if text is not None})
    try:
        children.check(options.auto)
        if not program.is_module:
            check_script(program.name)
    except (AmpatchError, OSError, ValueError) as error:
        options.parser.error(str(error))
    if native_first.may_restart(options.given) and native_first.build():
        return native_first.restart()
    from ampatch.cli.run_notes import RunNotes

    notes = RunNotes(str(program), given)
    children.start(options.auto, notes.child_started)

    def execute() -> int:
        try:
            code = _execute(program, options)
        finally:
            notes.close()
        if code == 0 and not options.auto:
            notes.say_unused()
        return code

    if options.debug:
        return run_debugged(execute, options.stop_at or "unabsorbed")
    return execute()


def _execute(program: Program, options: argparse.Namespace) -> int:
    from ampatch.launch.script import ModuleMissing

    try:
        return program.run(options.arguments).exit_code
    except ModuleMissing as error:
        parser: argparse.ArgumentParser = options.parser
        parser.error(str(error))
