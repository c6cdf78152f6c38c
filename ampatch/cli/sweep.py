"""The command `ampatch sweep`: its options, and a sweep with them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any, TextIO

from ampatch.cli import native_first
from ampatch.cli.ending import allow_interrupts, interrupt_message
from ampatch.cli.script_options import add_program
from ampatch.cli.sweep_options import add_options, construct
from ampatch.cli.sweep_output import add_trackers, check_installed, write_files

if TYPE_CHECKING:
    from ampatch.sweep import Sweep
    from ampatch.sweep.execution.progress import Lines


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "sweep",
        allow_abbrev=False,
        help="run a script at several opt levels and compare them",
        usage="ampatch sweep SCRIPT [options] [-- SCRIPT ARGUMENTS]\n"
        "       ampatch sweep -m MODULE [options] [-- MODULE ARGUMENTS]",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28),
        description="Runs SCRIPT, unedited, at each opt level, half dtype and seed, each run in "
        "its own process. Prints a table, verdicts and a recommendation.",
        epilog="In SCRIPT ARGUMENTS {seed}, {steps} and {trial_dir} (an empty folder) are "
        "replaced; AMPATCH_SEED and AMPATCH_TRIAL_DIR have them too.",
    )
    add_program(parser)
    later = add_options(parser)
    add_trackers(later)
    later.add_argument("--quiet", action="store_true", help="print only the results")
    later.add_argument(
        "--json", action="store_true", help="print summary.json, and all else to stderr"
    )


def run(options: argparse.Namespace) -> int:
    trackers = check_installed(options)
    from ampatch.sweep import Sweep, SweepError
    from ampatch.sweep.execution.progress import Lines
    from ampatch.sweep.json_files import to_json

    sweep = construct(options, Sweep)
    stopped: str | None = None
    lines = None if options.quiet else Lines(sys.stderr)
    code = 0
    try:
        with allow_interrupts():
            if not sweep.runs:  # a resumed sweep keeps the native part of its first trials
                native_first.build()
            sweep.run(lines)
    except KeyboardInterrupt as error:
        message, code = interrupt_message(error, sweep.directory)
        print(message, file=sys.stderr, flush=True)  # who sent SIGTERM may not wait for the report
        stopped = ""
    except OSError as error:
        stopped, code = f"{error}. Fix the cause, and continue with --resume.", 1
    except SweepError as error:  # the reason comes before the results that it explains
        print(f"Stopped: {error}", file=sys.stderr, flush=True)
        stopped, code = "", 1
    result = report(sweep, lines, stopped, trackers, sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps(to_json(sweep.results.to_json()), indent=1))
    return result or code


def report(
    sweep: Sweep, lines: Lines | None, stopped: str | None, trackers: list[str], stream: TextIO
) -> int:
    """Print and write the results so far; returns 1 if no run is good.

    Notes that `lines` has shown are not printed again.  `stopped` says why the sweep ended early:
    "" if that was printed, None if all trials have run.
    """
    from ampatch.sweep.report.terminal import write_results

    results = sweep.results
    notes = [note for note in results.notes if lines is None or note not in lines.shown]
    failures = () if lines is None else {case.label for case in sweep.shown_failures}
    write_results(dataclasses.replace(results, notes=notes), stream, failures)
    try:
        write_files(sweep.directory, trackers, stream)
    except OSError as error:
        print(f"The report could not be written: {error}", file=sys.stderr)
        return 1
    if stopped is not None:
        ended = f"Runs that have ended: {results.done}."
        print(*filter(None, (stopped, ended)), sep="\n", file=sys.stderr)
        return 0
    return 0 if any(row.good_runs for row in results.rows) else 1
