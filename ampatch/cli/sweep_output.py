"""What `sweep` and `report` share: the files made of stored results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

_TRACKERS = {
    "tensorboard": "also write event files, to DIR/tensorboard",
    "wandb": "also write the runs to Weights & Biases",
}


def add_trackers(parser: Any) -> None:
    """Add an option for each experiment tracker."""
    for name, text in _TRACKERS.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)


def check_installed(options: argparse.Namespace) -> list[str]:
    """The trackers that are asked for; ends the command if the extra or a library is missing."""
    from ampatch.sweep import check_extra
    from ampatch.sweep.report.trackers import check

    chosen = [name for name in _TRACKERS if getattr(options, name, False)]
    try:
        check_extra()
        for name in chosen:
            check(name)
    except ImportError as error:
        options.parser.error(str(error))
    return chosen


def write_files(directory: Path, trackers: Sequence[str], stream: TextIO | None = None) -> None:
    """Write pages, pictures and tables of the stored results, and say where they are."""
    from ampatch.sweep.report.render import write_report
    from ampatch.sweep.report.trackers import write

    write_report(directory)
    print(
        f"Written to {directory}: report.html, plots/, summary.json, .csv, .md and .tex; "
        "runs and their logs in runs/.",
        file=stream,
    )
    for name in trackers:
        print(write(name, directory), file=stream)
