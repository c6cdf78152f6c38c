"""The command `ampatch apex-path`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    commands.add_parser(
        "apex-path",
        help="print the folder that makes `import apex` find ampatch",
        description="Prints a folder for PYTHONPATH. With it `from apex import amp` finds ampatch "
        "in every Python process, as under ampatch run. An installed apex with amp comes first.",
        epilog='Example: PYTHONPATH="$(python -m ampatch apex-path)" python train.py.',
    )


def run(options: argparse.Namespace) -> int:
    print(Path(__file__).parents[1] / "compat" / "apex_path")
    return 0
