"""The command `ampatch doctor`."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from typing import Any

from ampatch._version import __version__


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
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        return _without_torch(options, str(error))
    from ampatch.diagnose import doctor

    if options.json:
        print(json.dumps(doctor.as_dict(), indent=2))
    else:
        doctor.write_report(sys.stdout)
    return 0


def _without_torch(options: argparse.Namespace, error: str) -> int:
    """The report where torch cannot be imported."""
    versions = {"python": platform.python_version(), "ampatch": __version__, "torch": None}
    if options.json:
        print(json.dumps({"versions": versions, "torch_error": error}, indent=2))
        return 1
    print(f"{'python':<22}{versions['python']} on {platform.platform()}")
    print(f"{'ampatch':<22}{__version__}")
    print(f"{'torch':<22}cannot be imported: {error}")
    print(
        "\nampatch needs torch. To install it: pip install torch\n"
        "For another accelerator, or the CPU alone: https://pytorch.org/get-started/locally/"
    )
    return 1
