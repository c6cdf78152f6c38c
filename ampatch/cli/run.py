"""The command `ampatch run`: its options, and what is set up before the script starts."""

from __future__ import annotations

import argparse
from typing import Any

from ampatch.cli import native_first
from ampatch.cli.debugging import run_debugged
from ampatch.cli.script_options import (
    AUTO,
    SETTINGS,
    add_script_command,
    apply_settings,
    program_of,
    start,
)

OPTIONS = {
    **SETTINGS,
    **AUTO,
    "--debug": {
        "action": "store_true",
        "help": "say where the first inf or NaN comes from: operator, module, line; the script "
        "ends there (slow)",
    },
    "--stop-at": {
        "choices": ("unabsorbed", "any"),
        "help": "where --debug stops: at the first inf or NaN that a smaller loss scale would "
        "not cure, or at any inf or NaN (default: unabsorbed)",
    },
}


def add_parser(commands: Any) -> None:
    add_script_command(
        commands, "run", OPTIONS,
        help="run one script at a given opt level",
        description="Runs SCRIPT as Python would. These options replace the arguments of its "
        "initialize; with --auto a script without AMP code runs in mixed precision. `from apex "
        "import amp` finds ampatch, unless an apex that has amp is installed.",
        epilog="Under torchrun: torchrun --nproc-per-node 2 -m ampatch run SCRIPT.",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    program = program_of(options)
    if options.stop_at is not None and not options.debug:
        options.parser.error("--stop-at goes with --debug")
    apply_settings(options, program)
    if native_first.may_restart(options.argv) and native_first.build():
        return native_first.restart()
    from ampatch.log import show_without_handlers

    show_without_handlers(True)
    notes = start(options, program)

    def execute() -> int:
        try:
            code = program.run(options.arguments).exit_code
        finally:
            notes.close()
        if code == 0:
            notes.print_if_unused()
        if code == 0 and not options.debug:  # which says the same
            notes.print_if_no_step()
        return code

    if options.debug:
        return run_debugged(execute, options.stop_at or "unabsorbed")
    return execute()
