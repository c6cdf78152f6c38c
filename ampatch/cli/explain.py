"""The command `ampatch explain`.  If the script fails, it prints the answer so far."""

from __future__ import annotations

import argparse
from typing import Any

from ampatch.cli.script_options import (
    STEP_OPTIONS,
    add_script_command,
    print_answer,
    run_watched,
)


def add_parser(commands: Any) -> None:
    add_script_command(
        commands, "explain", STEP_OPTIONS,
        help="show what a script casts, and where time could be saved",
        description="Runs SCRIPT for some optimizer steps. Prints a table of functions with their "
        "calls, casts, uses of cached half copies and bytes cast. Prints a table of modules with "
        "the dtypes of their inputs and outputs. Says where time could be saved. The output of "
        "SCRIPT goes to the standard error.",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    from ampatch.diagnose.explain import report

    code, steps, explanation = run_watched(options, report)
    if steps or explanation.modules:
        print_answer(options, explanation)
    return code
