"""The command `ampatch sweep`: its options, and a sweep with them.

The sweep itself is imported when it runs.  Exit codes: 0; 1 when no run went
well or the sweep could not go on; 2 for a wrong command line; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from ampatch.cli import native_first
from ampatch.cli.ending import cause
from ampatch.cli.option_types import name_and_value
from ampatch.cli.script_options import add_program, program_of, refuse_launcher
from ampatch.cli.sweep_output import add_trackers, check_trackers, write_shown
from ampatch.config.sweep_options import GROUPS, HOW, flag, help_texts, of_command

if TYPE_CHECKING:
    from ampatch.sweep import Sweep


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = commands.add_parser(
        "sweep",
        help="run a script at several opt levels and compare them",
        usage="ampatch sweep SCRIPT [options] [-- SCRIPT ARGUMENTS]\n"
        "       ampatch sweep -m MODULE [options] [-- MODULE ARGUMENTS]",
        description="Runs SCRIPT per opt level, half dtype and seed, each in a fresh process, "
        "and prints a table, verdicts and a recommendation. SCRIPT is not edited: its "
        "ampatch.initialize takes opt level and dtype from AMPATCH_OPT_LEVEL and AMPATCH_DTYPE. "
        "O0 runs once per seed, and torch.autocast with GradScaler once per dtype and seed.",
        epilog="In the script's arguments {seed}, {steps} and {trial_dir} (an empty directory for "
        "each trial) are replaced. A script without such options can read AMPATCH_SEED and "
        "AMPATCH_TRIAL_DIR; one that seeds nothing is seeded before it starts.",
    )
    add_program(parser)
    _add_options(parser)
    parser.set_defaults(command=run, parser=parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the table, in its groups, and those of trackers."""
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    texts = help_texts()
    for one in of_command():
        groups[one.metadata["group"]].add_argument(
            flag(one),
            dest=one.name,
            help=texts.get(one.name, "").replace("%", "%%"),  # none with python -OO
            default=argparse.SUPPRESS,  # the table's own
            **_taken(one),
        )
    add_trackers(groups[HOW])


def _taken(option: dataclasses.Field[Any]) -> dict[str, Any]:
    """What follows the flag."""
    if isinstance(option.default, bool):
        return {"action": "store_const", "const": not option.default}
    metavar = option.metadata["metavar"]
    if option.default_factory is dict:
        return {"action": _Pairs, "type": name_and_value, "metavar": metavar}
    if option.name == "overrides":
        return {"action": "append", "metavar": metavar}
    return {"type": option.metadata["parse"], "metavar": metavar}


class _Pairs(argparse.Action):
    """Adds NAME=VALUE to a dictionary."""

    def __call__(self, parser: Any, options: Any, pair: Any, flag: Any = None) -> None:
        given = getattr(options, self.dest, {})
        setattr(options, self.dest, {**given, pair[0]: pair[1]})


def run(options: argparse.Namespace) -> int:
    """Run the sweep, print and write its results; returns the exit code."""
    from ampatch.sweep import SweepError
    from ampatch.sweep.execution.progress import progress_on

    trackers = check_trackers(options)
    sweep = _sweep(options)
    stopped, code = "", 0
    try:
        if not sweep.runs:  # a sweep that goes on keeps what its first trials had
            native_first.build()
        sweep.run(progress_on(sys.stderr, getattr(options, "steps", None)))
    except KeyboardInterrupt:
        stopped, code = "Interrupted; --resume goes on.", 130
    except OSError as error:
        stopped, code = f"{error}. With that put right, --resume goes on.", 1
    except SweepError as error:
        stopped, code = f"Stopped: {error}", 1
    return _report(sweep, stopped, trackers) or code


def _sweep(options: argparse.Namespace) -> Sweep:
    """The sweep that the options describe; a wrong option ends the command."""
    from ampatch.sweep import Sweep

    parser: argparse.ArgumentParser = options.parser
    program = program_of(options)
    refuse_launcher(options, program, advice=" --nproc-per-node N")
    named = {one.name for one in of_command()}
    asked = {name: value for name, value in vars(options).items() if name in named}
    try:
        return Sweep(program.name, options.arguments, module=program.is_module, **asked)
    except OSError as error:
        parser.error(cause(error))
    except (ImportError, ValueError) as error:
        parser.error(str(error))


def _report(sweep: Sweep, stopped: str, trackers: list[str]) -> int:
    """Print and write the results so far; returns 1 if no run went well."""
    from ampatch.sweep.report.terminal import write_results

    results = sweep.results
    write_results(results, sys.stdout, told={case.label for case in sweep.told})
    try:
        write_shown(sweep.directory, trackers)
    except OSError as error:
        print(f"The report could not be written: {error}", file=sys.stderr)
        return 1
    if stopped:
        left = results.planned - results.done
        print(f"{stopped}\n{left} of {results.planned} runs are missing.", file=sys.stderr)
        return 0
    return 0 if any(row.good_runs for row in results.rows) else 1
