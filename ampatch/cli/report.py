"""The command `ampatch report`: table, pictures and page of a stored sweep, without a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ampatch.cli.ending import cause
from ampatch.cli.sweep_output import add_trackers, check_installed, write_files


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="write a sweep's report again, from its stored results",
        description="Prints the table of the sweep in DIR, and writes report.html, plots/, "
        "summary.csv, .md and .tex again, also after a sweep was killed. Runs no trial.",
    )
    parser.add_argument("directory", metavar="DIR", help="the folder of the sweep")
    add_trackers(parser)


def run(options: argparse.Namespace) -> int:
    from ampatch.sweep.report.results import read_sweep
    from ampatch.sweep.report.terminal import write_results

    trackers = check_installed(options)
    directory = Path(options.directory)
    try:
        results = read_sweep(directory).results
    except (OSError, ValueError) as error:
        options.parser.error(str(error))
    write_results(results, sys.stdout)
    try:
        write_files(directory, trackers)
    except OSError as error:
        print(f"ampatch report: {cause(error)}", file=sys.stderr)
        return 1
    return 0
