"""What `sweep` and `report` share: the files made of stored results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_tensorboard(parser: Any) -> None:
    """Add the option --tensorboard."""
    parser.add_argument(
        "--tensorboard",
        action="store_true",
        help="also write event files for TensorBoard, to DIR/tensorboard",
    )


def check_tensorboard(options: argparse.Namespace) -> None:
    """End the command if --tensorboard is asked for and tensorboard is missing."""
    from ampatch.sweep.report.tensorboard_events import check

    if options.tensorboard:
        try:
            check()
        except ImportError as error:
            options.parser.error(f"--tensorboard: {error}")


def write_shown(directory: Path, tensorboard: bool) -> None:
    """Write pages, pictures and tables of the stored results, and print where they are."""
    from ampatch.sweep.report.render import write_report
    from ampatch.sweep.report.tensorboard_events import write_events

    lacking = write_report(directory)
    if tensorboard:
        write_events(directory)
    events = ", tensorboard/" if tensorboard else ""
    print(
        f"Written to {directory}: report.html, plots/{events}, summary.json, .csv, .md; runs and "
        "their logs in runs/."
    )
    if lacking:
        print(lacking, file=sys.stderr)
