"""The command `ampatch gradients`.  If the script fails, it prints the answer so far."""

from __future__ import annotations

import argparse
from typing import Any

from ampatch.cli.option_types import percentage
from ampatch.cli.script_options import (
    STEP_OPTIONS,
    add_script_command,
    print_answer,
    run_watched,
)

OPTIONS = {
    **STEP_OPTIONS,
    "--lost": {
        "type": percentage,
        "default": 0.1,
        "metavar": "PERCENT",
        "help": "how many gradients a static loss scale may lose (default: 0.1)",
    },
}


def add_parser(commands: Any) -> None:
    add_script_command(
        commands, "gradients", OPTIONS,
        help="show how large a script's gradients are, and how many float16 loses",
        description="Runs SCRIPT for some optimizer steps. Prints a histogram of its gradients "
        "by binary exponent, the share that float16 flushes to zero at loss scale 1 and at the "
        "current scale, and suggests a static loss scale. The output of SCRIPT goes to the "
        "standard error.",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    from ampatch.diagnose.gradient_range import gradient_range

    code, steps, watch = run_watched(options, gradient_range)
    if steps:
        print_answer(options, watch.report(options.lost / 100))
    return code
