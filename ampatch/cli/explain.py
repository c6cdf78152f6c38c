"""The command `ampatch explain`: the answer so far is printed where the script fails, too."""

from __future__ import annotations

import argparse
import shlex
import sys
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
    import ampatch
    from ampatch.diagnose.explain import report

    watch, skips = report(), _Skips()
    stop = ampatch.observe(skips)
    code, steps = run_steps(options)
    stop()
    watch.remove()
    if steps or watch.modules:
        print_answer(options, watch)
    if code or skips.are_most:
        arguments = ["--", *options.arguments] if options.arguments else []
        command = [*options.program.words, "--opt-level", "LEVEL", *arguments]
        print(
            f"If {options.program} trains well at O0, ampatch tune finds the modules that need "
            f"FP32: ampatch tune {shlex.join(command)}",
            file=sys.stderr,
        )
    return code


class _Skips:
    """An observer of the steps that were skipped because of an overflow."""

    def __init__(self) -> None:
        self._skipped: list[Any] = []

    def on_step(self, optimizer: Any, skipped: Any) -> None:
        self._skipped.append(skipped)

    @property
    def are_most(self) -> bool:
        return 2 * sum(map(bool, self._skipped)) > len(self._skipped)
