"""The command `ampatch gradients`: the answer so far is printed where the script fails, too."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ampatch.cli.option_types import percentage
from ampatch.cli.script_options import add_script_command, apply_settings, print_answer, run_steps


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = add_script_command(
        commands,
        "gradients",
        "how large a script's gradients are, and what float16 loses of them",
        "Runs SCRIPT for some optimizer steps and prints a histogram of its gradients by binary "
        "exponent, the share that float16 flushes to zero at loss scale 1 and at the script's, "
        "and the static loss scale that keeps the rest.",
        run,
    )
    parser.add_argument(
        "--lost",
        type=percentage,
        default=0.1,
        metavar="PERCENT",
        help="how much a static loss scale may lose (default: 0.1)",
    )
    parser.add_argument("--plot", metavar="FILE", help="write a picture, too (matplotlib)")


def run(options: argparse.Namespace) -> int:
    """Run the script, print what was found; returns the exit code."""
    apply_settings(options)
    from ampatch.diagnose import gradient_report
    from ampatch.diagnose.gradient_range import gradient_range

    if options.plot is not None:
        try:
            gradient_report.check_plot()
            gradient_report.check_path(options.plot)
        except (ImportError, OSError, ValueError) as error:
            options.parser.error(f"--plot: {error}")
    watch = gradient_range()
    code, steps = run_steps(options)
    watch.remove()
    found = watch.report(options.lost / 100)
    if steps:
        print_answer(options, found)
        if options.plot is not None:
            found.plot(options.plot)
            print(f"Written to {options.plot}.", file=sys.stderr)
    return code
