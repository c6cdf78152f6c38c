"""The command `ampatch sweep`: its options, and a sweep with them.

The sweep itself is imported when it runs.  Exit codes: 0; 1 when no run went
well or the sweep could not go on; 2 for a wrong command line; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ampatch.cli.sweep_output import add_tensorboard, check_tensorboard, write_shown


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = commands.add_parser(
        "sweep",
        help="run a script at several opt levels and compare them",
        usage="ampatch sweep SCRIPT [options] [-- SCRIPT ARGUMENTS]",
        description="Runs SCRIPT per opt level, half dtype and seed, each in a fresh process, "
        "and prints a table, verdicts and a recommendation. SCRIPT is not edited: its "
        "ampatch.initialize takes opt level and dtype from AMPATCH_OPT_LEVEL and AMPATCH_DTYPE. "
        "O0 runs once per seed, and torch.autocast with GradScaler once per dtype and seed.",
        epilog="In the script's arguments {seed} and {steps} are replaced. A script without such "
        "an option can read AMPATCH_SEED; one that seeds nothing is seeded before it starts.",
    )
    parser.add_argument("script", metavar="SCRIPT")
    _add_what(parser)
    _add_measures(parser)
    _add_how(parser)
    parser.set_defaults(command=run, parser=parser)


def _add_what(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is run")
    what.add_argument(
        "--levels",
        type=_names,
        help="opt levels, with commas between (default: O0,O1,O2,O3; with --auto O0,O1)",
    )
    what.add_argument(
        "--dtypes",
        type=_names,
        default=["float16"],
        help="half dtypes: float16,bfloat16 (default: float16)",
    )
    what.add_argument(
        "--with",
        dest="overrides",
        action="append",
        default=[],
        metavar='"LEVEL NAME=VALUE ..."',
        help='one more row, with settings of initialize: "O2 keep_batchnorm_fp32=False"',
    )
    what.add_argument(
        "--no-autocast",
        dest="autocast",
        action="store_false",
        help="leave out the rows of torch.autocast and GradScaler",
    )
    what.add_argument(
        "--auto",
        action="store_true",
        help="for a script without AMP code: O0 and O1, as by ampatch run --auto",
    )
    what.add_argument(
        "--seeds",
        type=_count,
        default=1,
        metavar="N",
        help="run each row with seeds 0 to N-1; accuracy is tested from 2 on (default: 1)",
    )
    what.add_argument(
        "--repeats",
        type=_count,
        default=1,
        metavar="N",
        help="run each seed N times, for more timings; rows take turns (default: 1)",
    )
    what.add_argument(
        "--steps", type=_count, metavar="N", help="end each run after N optimizer steps"
    )


def _add_measures(parser: argparse.ArgumentParser) -> None:
    measures = parser.add_argument_group("what is measured")
    measures.add_argument(
        "--metric",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=REGEX",
        help=r"a number in the script's output, such as 'accuracy=acc: ([\d.]+)'; scripts that "
        "call ampatch.log_metrics(accuracy=...) need none",
    )
    measures.add_argument(
        "--judge",
        metavar="NAME",
        help='what the verdict is about: a metric or "last loss" (default: the first metric)',
    )
    measures.add_argument(
        "--better",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=lower|higher",
        help="which way a metric is better (default: as its name has it; loss and error are lower)",
    )


def _add_how(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("where and how")
    how.add_argument(
        "--out",
        metavar="DIR",
        help="for results and logs (default: ampatch-sweep/ and the script's name, numbered "
        "if there is one)",
    )
    how.add_argument("--resume", action="store_true", help="go on with the sweep in DIR")
    how.add_argument("--overwrite", action="store_true", help="replace the sweep in DIR")
    how.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="end a run that takes longer, and go on with the next",
    )
    add_tensorboard(how)


def run(options: argparse.Namespace) -> int:
    """Run the sweep, print and write its results; returns the exit code."""
    from ampatch.sweep import Sweep, SweepError
    from ampatch.sweep.execution.progress import progress_on

    check_tensorboard(options)
    try:
        plan = Sweep(
            options.script,
            options.arguments,
            levels=options.levels,
            dtypes=options.dtypes,
            seeds=options.seeds,
            repeats=options.repeats,
            steps=options.steps,
            overrides=options.overrides,
            metrics=dict(options.metric),
            judge=options.judge,
            better=dict(options.better),
            autocast=options.autocast,
            auto=options.auto,
            out=options.out,
            timeout=options.timeout,
            resume=options.resume,
            overwrite=options.overwrite,
        )
    except OSError as error:
        options.parser.error(
            f"{error.filename}: {error.strerror}" if error.filename else str(error)
        )
    except ValueError as error:
        options.parser.error(str(error))
    stopped, code = "", 0
    try:
        plan.run(progress_on(sys.stderr, options.steps))
    except KeyboardInterrupt:
        stopped, code = "Interrupted; --resume goes on.", 130
    except OSError as error:
        stopped, code = f"{error}. With that put right, --resume goes on.", 1
    except SweepError as error:
        stopped, code = f"Stopped: {error}", 1
    return _report(plan, stopped, options.tensorboard) or code


def _report(plan: Any, stopped: str, tensorboard: bool) -> int:
    """Print and write the results so far; returns 1 if no run went well."""
    from ampatch.sweep.report.table import write_results

    results = plan.results
    write_results(results, sys.stdout)
    try:
        write_shown(plan.directory, tensorboard)
    except OSError as error:
        print(f"The report could not be written: {error}", file=sys.stderr)
        return 1
    if stopped:
        left = results.planned - results.done
        print(f"{stopped}\n{left} of {results.planned} runs are missing.", file=sys.stderr)
        return 0
    return 0 if any(row.good_runs for row in results.rows) else 1


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    return name, value


def _count(text: str) -> int:
    count = int(text)  # argparse makes an error message of the ValueError
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return count


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return seconds
