"""The command `ampatch compare`: two stored sweeps side by side, without a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = commands.add_parser(
        "compare",
        help="put two stored sweeps side by side, such as those of two versions of torch",
        description="Prints what differs in how the sweeps in A and B were run, then their rows "
        "side by side: step time, memory and accuracy, B with A. Accuracy is tested as within a "
        "sweep, over the seeds that both have. Nothing is run.",
    )
    parser.add_argument("first", metavar="A", help="what ampatch sweep wrote to")
    parser.add_argument("second", metavar="B", help="the same of another sweep")
    parser.add_argument(
        "--judge",
        metavar="NAME",
        help='what the verdicts are about: a metric or "last loss" (default: as in A)',
    )
    parser.set_defaults(command=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Print the comparison; returns the exit code."""
    from ampatch.sweep.report.results import read_sweep
    from ampatch.sweep.report.side_by_side import side_by_side
    from ampatch.sweep.report.side_by_side_text import write_side_by_side

    parser: argparse.ArgumentParser = options.parser
    if Path(options.first).resolve() == Path(options.second).resolve():
        parser.error(f"{options.second}: A and B are the same directory. Expected two sweeps.")
    try:
        both = side_by_side(read_sweep(options.first), read_sweep(options.second), options.judge)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    write_side_by_side(both, sys.stdout)
    if not both.pairs:
        print("ampatch compare: the sweeps have no row in common.", file=sys.stderr)
        return 1
    return 0
