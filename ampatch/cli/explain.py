"""The command `ampatch explain`: the answer so far is printed where the script fails, too."""

from __future__ import annotations

import argparse
from typing import Any

from ampatch.cli.script_options import WATCHED, add_script_command, print_answer, run_watched


def add_parser(commands: Any) -> None:
    add_script_command(
        commands, "explain", WATCHED,
        help="what is cast in a script, and where time could be won",
        description="Runs SCRIPT for some optimizer steps and prints, per function, its calls, the "
        "casts made for it, those served from cached copies of weights and the bytes they wrote; "
        "per module the dtypes in and out; and where time could be won. The output of SCRIPT goes "
        "to the standard error.",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    from ampatch.diagnose.explain import report

    code, steps, explanation = run_watched(options, report)
    if steps or explanation.modules:
        print_answer(options, explanation)
    return code
