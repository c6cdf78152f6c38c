"""The command `ampatch`: sweep, run, tables, gradients, explain, doctor.

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
from ampatch.diagnose import command as diagnose
from ampatch.run import command as run


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
    _add_sweep(commands)
    run.add_parser(commands)
    _add_tables(commands)
    diagnose.add_parsers(commands)
    return parser


def _add_sweep(commands: Any) -> None:
    parser = commands.add_parser(
        "sweep",
        help="run a script at several opt levels and compare them",
        usage="ampatch sweep SCRIPT [options] [-- SCRIPT ARGUMENTS]",
        description="Runs SCRIPT once per opt level and half dtype, each in a fresh process, "
        "and prints a table. SCRIPT is not edited: its ampatch.initialize takes opt level and "
        "dtype from AMPATCH_OPT_LEVEL and AMPATCH_DTYPE. O0 runs once.",
    )
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument(
        "--levels",
        type=_names,
        default=["O0", "O1", "O2", "O3"],
        help="opt levels, with commas between (default: O0,O1,O2,O3)",
    )
    parser.add_argument(
        "--dtypes",
        type=_names,
        default=["float16"],
        help="half dtypes: float16,bfloat16 (default: float16)",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="for sweep.json, records and logs (default: ampatch-sweep/ and the "
        "script's name); an earlier sweep there is replaced",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="end a run that takes longer, and go on with the next",
    )
    parser.set_defaults(command=sweep_command, parser=parser)


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


# sweep


def sweep_command(options: argparse.Namespace) -> int:
    from ampatch.sweep import Sweep
    from ampatch.sweep.progress import progress_on
    from ampatch.sweep.summary import OK
    from ampatch.sweep.table import write_table

    try:
        plan = Sweep(
            options.script,
            options.arguments,
            levels=options.levels,
            dtypes=options.dtypes,
            out=options.out,
            timeout=options.timeout,
        )
    except (OSError, ValueError) as error:
        options.parser.error(str(error))
    interrupted = False
    try:
        plan.run(progress_on(sys.stderr))
    except KeyboardInterrupt:
        interrupted = True
        left = len(plan.cases) - len(plan.runs)
        print(f"Interrupted; {left} of {len(plan.cases)} runs are missing.", file=sys.stderr)
    write_table(plan.rows, sys.stdout)
    print(f"Written to {plan.table_file}; records and logs are beside it.")
    if interrupted:
        return 130
    return 0 if any(row.status == OK for row in plan.rows) else 1


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _seconds(text: str) -> float:
    seconds = float(text)  # argparse makes an error message of the ValueError
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return seconds


# tables


def tables_command(options: argparse.Namespace) -> int:
    from ampatch.tables_command.command import run

    return run(options)
