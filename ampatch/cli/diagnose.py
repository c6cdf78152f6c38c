"""The commands `ampatch gradients`, `explain` and `doctor`, and `run --debug`.

Exit codes: 0; the script's own if it failed, after the answer so far; 1 if it never
stepped an optimizer; 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from ampatch.errors import AmpatchError

DEFAULT_STEPS = 20


def add_parsers(commands: Any) -> None:
    """Add the three commands to `ampatch`'s."""
    gradients = _script_command(
        commands,
        "gradients",
        "how large a script's gradients are, and what float16 loses of them",
        "Runs SCRIPT for some optimizer steps and prints a histogram of its gradients by binary "
        "exponent, the share that float16 flushes to zero at loss scale 1 and at the script's, "
        "and the static loss scale that keeps the rest.",
        gradients_command,
    )
    gradients.add_argument(
        "--lost",
        type=_percent,
        default=0.1,
        metavar="PERCENT",
        help="how much a static loss scale may lose (default: 0.1)",
    )
    gradients.add_argument("--plot", metavar="FILE", help="write a picture, too (matplotlib)")
    _script_command(
        commands,
        "explain",
        "what is cast in a script, and where time could be won",
        "Runs SCRIPT for some optimizer steps and prints, per function, its calls, the casts made "
        "for it, those served from cached copies of weights and the bytes they wrote; per module "
        "the dtypes in and out; and where time could be won.",
        explain_command,
    )
    doctor = commands.add_parser(
        "doctor",
        help="versions, devices, and how fast half is here",
        description="Prints what a report about a problem should begin with. Takes two seconds.",
    )
    doctor.add_argument("--json", action="store_true", help="as JSON")
    doctor.set_defaults(command=doctor_command, parser=doctor)


def _script_command(
    commands: Any, name: str, title: str, description: str, command: Callable
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=title,
        usage=f"ampatch {name} SCRIPT [options] [-- SCRIPT ARGUMENTS]",
        description=f"{description} What SCRIPT prints goes to the standard error.",
    )
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument(
        "--steps",
        type=_positive,
        default=DEFAULT_STEPS,
        metavar="N",
        help=f"end the script after N optimizer steps (default: {DEFAULT_STEPS})",
    )
    parser.add_argument("--opt-level", metavar="LEVEL", help="sets AMPATCH_OPT_LEVEL")
    parser.add_argument("--dtype", help="sets AMPATCH_DTYPE: float16 or bfloat16")
    parser.add_argument("--json", action="store_true", help="the answer as JSON")
    parser.set_defaults(command=command, parser=parser)
    return parser


def gradients_command(options: argparse.Namespace) -> int:
    _check(options)
    from ..diagnose import gradient_plot
    from ..diagnose.gradient_range import gradient_range

    if options.plot is not None:
        try:
            gradient_plot.check()
            gradient_plot.check_path(options.plot)
        except (ImportError, OSError, ValueError) as error:
            options.parser.error(f"--plot: {error}")
    watch = gradient_range()
    code, steps = _run(options)
    watch.remove()
    found = watch.report(options.lost / 100)
    if steps:
        _print(options, found)
        if options.plot is not None:
            found.plot(options.plot)
            print(f"Written to {options.plot}.", file=sys.stderr)
    return code


def explain_command(options: argparse.Namespace) -> int:
    _check(options)
    from ..diagnose.explain import report

    watch = report()
    code, steps = _run(options)
    watch.remove()
    if steps or watch.modules:
        _print(options, watch)
    return code


def doctor_command(options: argparse.Namespace) -> int:
    from ..diagnose import doctor

    if options.json:
        print(json.dumps(doctor.as_dict(), indent=2))
    else:
        doctor.write_report(sys.stdout)
    return 0


def run_debugged(run: Callable[[], int]) -> int:
    """`run()` with every model watched; what is found is on the standard error at the end.

    For `ampatch run --debug`: `run` runs the script and returns its exit code.
    """
    from ..diagnose.nonfinite import debug

    with debug() as debugger:
        code = run()
    found = debugger.report
    steps = f"{debugger.step} optimizer steps"
    print(f"ampatch: {found or f'no inf or NaN in {steps}.'}", file=sys.stderr)
    return code


def _check(options: argparse.Namespace) -> None:
    """End with an error for a script that is not there and for settings nobody knows."""
    from ampatch.config import environment

    from ..diagnose.running import check_script

    given = {"AMPATCH_OPT_LEVEL": options.opt_level, "AMPATCH_DTYPE": options.dtype}
    try:
        check_script(options.script)
        if options.opt_level is not None:
            environment.opt_level("--opt-level", options.opt_level)
        if options.dtype is not None:
            environment.dtype("--dtype", options.dtype)
        environment.read()
    except (AmpatchError, OSError, ValueError) as error:
        options.parser.error(str(error))
    os.environ.update({name: value for name, value in given.items() if value is not None})


def _run(options: argparse.Namespace) -> tuple[int, int]:
    from ..diagnose.running import run_watched

    ending, steps = run_watched(options.script, options.arguments, options.steps)
    if ending.exit_code:
        print(
            f"{options.script} failed after {steps} optimizer steps"
            f"{f': {ending.error}' if ending.error else ''}.",
            file=sys.stderr,
        )
    elif steps == options.steps:
        print(f"Ended {options.script} after {steps} optimizer steps (--steps).", file=sys.stderr)
    elif not steps:
        print(
            f"{options.script} never stepped an optimizer: there is no training to look at.",
            file=sys.stderr,
        )
    return ending.exit_code or (0 if steps else 1), steps


def _print(options: argparse.Namespace, answer: Any) -> None:
    print(json.dumps(answer.as_dict(), indent=2) if options.json else answer)


def _positive(text: str) -> int:
    number = int(text)  # argparse makes an error message of the ValueError
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _percent(text: str) -> float:
    number = float(text)
    if not 0 <= number < 100:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0 and below 100")
    return number
