"""The command `ampatch doctor`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = commands.add_parser(
        "doctor",
        help="versions, devices, and how fast half is here",
        description="Prints what a report about a problem should begin with. Takes some seconds.",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(command=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Print the report; returns the exit code."""
    from ampatch.diagnose import doctor

    if options.json:
        print(json.dumps(doctor.as_dict(), indent=2))
    else:
        doctor.write_report(sys.stdout)
    return 0
