"""The command `ampatch tune`: its options, and the answer on the screen."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ampatch.cli import native_first
from ampatch.cli.ending import allow_interrupts, interrupt_message
from ampatch.cli.option_types import positive_count
from ampatch.cli.script_options import add_program
from ampatch.cli.sweep_options import add_options, construct
from ampatch.cli.sweep_output import check_installed
from ampatch.sweep.options import SHORT_DTYPES

OMITTED_OPTIONS = ("levels", "dtypes", "overrides", "autocast", "steps", "budget")
"""Options of a sweep that a tuning does not have."""
OPTION_TEXTS = {
    "seeds": "run the answer with seeds 0 to N-1, and candidates with half of them (default: 6; at "
    "least 4)",
    "rounds": "measure the speed of the answer, LEVEL and O0 in N rounds (default: 3)",
    "margin": "the difference from O0 that matters: a candidate passes if it is worse by less than "
    "this (default: 1% of O0's value)",
    "out": "folder for the answer, trials and logs (default: ampatch-tune/NAME)",
    "resume": "continue the tuning in the folder",
    "overwrite": "replace the tuning in the folder",
}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        allow_abbrev=False,
        help="find the modules that need FP32 at an opt level",
        usage="ampatch tune SCRIPT --opt-level LEVEL [options] [-- SCRIPT ARGUMENTS]\n"
        "       ampatch tune -m MODULE --opt-level LEVEL [options] [-- MODULE ARGUMENTS]",
        description="Finds the smallest set of modules that must stay FP32 so that SCRIPT trains "
        "at LEVEL as well as at O0. The cause may also be a setting. One run at O0 measures how "
        "sensitive each module is to half precision. Then candidates, sets of modules in FP32, "
        "train and are compared with O0 as in ampatch sweep.",
        epilog="The answer is a line to paste, and DIR/overrides.json for "
        "initialize(overrides=...), AMPATCH_OVERRIDES and ampatch run --overrides.",
    )
    add_program(parser)
    group = parser.add_argument_group("what to tune")
    group.add_argument("--opt-level", choices=("O1", "O2", "O3"), help="the level to repair")
    group.add_argument(
        "--dtype",
        type=lambda name: SHORT_DTYPES.get(name, name),
        choices=("float16", "bfloat16"),
        help="(default: float16)",
    )
    group.add_argument(
        "--probe-steps",
        type=positive_count,
        metavar="N",
        help="steps at O0 in which modules also compute in half (default: 100)",
    )
    group.add_argument(
        "--candidates",
        type=positive_count,
        metavar="N",
        help="try at most N candidates (default: 2 log2(n) + 8 for n modules)",
    )
    add_options(parser, OMITTED_OPTIONS, OPTION_TEXTS)


def run(options: argparse.Namespace) -> int:
    check_installed(options)
    from ampatch.sweep import SweepError
    from ampatch.sweep.execution.progress import Lines
    from ampatch.tune import TuneError, Tuning
    from ampatch.tune.answer import ANSWER, CURED, PASSES
    from ampatch.tune.report import write_pages, write_terminal

    tuning = construct(
        options,
        Tuning,
        opt_level=options.opt_level,
        dtype=options.dtype,
        probe_steps=options.probe_steps,
        candidates=options.candidates,
        progress=lambda: Lines(sys.stderr),
        say=lambda text: print(text, file=sys.stderr),
    )
    try:
        with allow_interrupts():
            native_first.build()
            answer = tuning.run()
    except KeyboardInterrupt as error:
        message, code = interrupt_message(error, tuning.directory)
        print(message, file=sys.stderr)
        return code
    except OSError as error:
        print(f"{error}. Fix the cause, and continue with --resume.", file=sys.stderr)
        return 1
    except (SweepError, TuneError) as error:
        print(f"Stopped: {error}", file=sys.stderr)
        return 1
    write_pages(tuning.directory, answer)
    write_terminal(answer, sys.stdout)
    files = f"{ANSWER},{' overrides.json,' if answer.line else ''} report.html"
    print(f"Written to {tuning.directory}: {files}.")
    return 0 if answer.outcome in (CURED, PASSES) else 1
