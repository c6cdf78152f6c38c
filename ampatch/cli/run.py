"""The command `ampatch run`: its options, and what it sets up before the script starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

from ampatch.errors import AmpatchError

_WITH_VALUE = ("--opt-level", "--dtype", "--loss-scale")


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What comes up to SCRIPT or `-m MODULE` is ours; the rest belongs to the script."""
    cut = 0
    while cut < len(argv) and argv[cut].startswith("-") and argv[cut] != "-m":
        cut += 2 if argv[cut] in _WITH_VALUE else 1
    cut += 2 if argv[cut : cut + 1] == ["-m"] else 1
    return list(argv[:cut]), list(argv[cut:])


def add_parser(commands: Any) -> None:
    """Add `run` to the subcommands."""
    parser = commands.add_parser(
        "run",
        help="run one script at a given opt level",
        usage="ampatch run [options] SCRIPT [SCRIPT ARGUMENTS]\n"
        "       ampatch run [options] -m MODULE [SCRIPT ARGUMENTS]",
        description="Runs SCRIPT as Python would, with what its initialize is given replaced by "
        "these options, or, with --auto, in mixed precision all by itself. `from apex import amp` finds ampatch, unless an apex is installed. "
        "Options come before SCRIPT.",
        epilog="Exit status: the script's own; 1 if an exception ends it; 130 after Ctrl-C; 2 for "
        "a wrong command line. Under torchrun: torchrun --nproc-per-node 2 -m ampatch run SCRIPT",
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
        "--auto",
        action="store_true",
        help="for a script without AMP code: cast torch's functions, scale each backward(), "
        "check each step(); at O1, in float16 or bfloat16",
    )
    parser.add_argument(
        "--debug",
        action="store_true",
        help="say where the first inf or NaN comes from: operator, module, parameter (slow)",
    )
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m")
    parser.add_argument("script", nargs="?", metavar="SCRIPT")
    parser.set_defaults(command=run_command, parser=parser)


def _option(name: str) -> Callable[[str], str]:
    """An option's text, checked as the variable of the same name."""

    def check(text: str) -> str:
        from ampatch.config import environment

        try:
            getattr(environment, name)(f"--{name.replace('_', '-')}", text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).partition("=")[2]) from None
        return text

    return check


def run_command(options: argparse.Namespace) -> int:
    """Run the script or module; returns its exit code."""
    if options.module is None and options.script is None:
        options.parser.error("the following arguments are required: SCRIPT")
    from ampatch import auto
    from ampatch.cli.diagnose import run_debugged
    from ampatch.config import environment
    from ampatch.launch import children
    from ampatch.launch.script import ModuleMissing, check_script, run_module, run_script

    given = {
        "AMPATCH_OPT_LEVEL": options.opt_level,
        "AMPATCH_DTYPE": options.dtype,
        "AMPATCH_LOSS_SCALE": options.loss_scale,
    }
    os.environ.update({name: value for name, value in given.items() if value is not None})
    try:
        asked = environment.read()
        if options.script is not None:
            check_script(options.script)
    except (AmpatchError, OSError, ValueError) as error:
        options.parser.error(str(error))
    if options.auto and (reason := auto.why_not(asked)) is not None:
        options.parser.error(reason)
    children.start(options.auto)

    def execute() -> int:
        if options.script is not None:
            return run_script(options.script, options.arguments).exit_code
        try:
            return run_module(options.module, options.arguments).exit_code
        except ModuleMissing as error:
            options.parser.error(str(error))

    return run_debugged(execute) if options.debug else execute()
