"""The command `ampatch explain`: the answer so far is printed where the script fails, too."""

from __future__ import annotations

import argparse
from typing import Any

from ampatch.cli.script_options import add_script_command, apply_settings, print_answer, run_steps


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    add_script_command(
        commands,
        "explain",
        "what is cast in a script, and where time could be won",
        "Runs SCRIPT for some optimizer steps and prints, per function, its calls, the casts made "
        "for it, those served from cached copies of weights and the bytes they wrote; per module "
        "the dtypes in and out; and where time could be won.",
        run,
    )


def run(options: argparse.Namespace) -> int:
    """Run the script, print what was cast; returns the exit code."""
    apply_settings(options)
    from ampatch.diagnose.explain import report

    watch = report()
    code, steps = run_steps(options)
    watch.remove()
    if steps or watch.modules:
        print_answer(options, watch)
    return code
