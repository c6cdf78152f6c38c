"""The command `ampatch sweep`: its options, and a sweep with them.

The sweep itself is imported when it runs.  Exit codes: 0; 1 when no run went
well or the sweep could not go on; 2 for a wrong command line; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from ampatch.cli import native_first
from ampatch.cli.ending import cause
from ampatch.cli.option_types import (
    name_and_value,
    name_list,
    positive_count,
    positive_seconds,
)
from ampatch.cli.script_options import add_program, program_of, refuse_launcher
from ampatch.cli.sweep_output import add_trackers, check_trackers, write_shown

if TYPE_CHECKING:
    from ampatch.sweep import Sweep


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = commands.add_parser(
        "sweep",
        help="run a script at several opt levels and compare them",
        usage="ampatch sweep SCRIPT [options] [-- SCRIPT ARGUMENTS]\n"
        "       ampatch sweep -m MODULE [options] [-- MODULE ARGUMENTS]",
        description="Runs SCRIPT per opt level, half dtype and seed, each in a fresh process, "
        "and prints a table, verdicts and a recommendation. SCRIPT is not edited: its "
        "ampatch.initialize takes opt level and dtype from AMPATCH_OPT_LEVEL and AMPATCH_DTYPE. "
        "O0 runs once per seed, and torch.autocast with GradScaler once per dtype and seed.",
        epilog="In the script's arguments {seed}, {steps} and {trial_dir} (an empty directory for "
        "each trial) are replaced. A script without such options can read AMPATCH_SEED and "
        "AMPATCH_TRIAL_DIR; one that seeds nothing is seeded before it starts.",
    )
    add_program(parser)
    _add_what(parser)
    _add_measures(parser)
    _add_how(parser)
    _add_where(parser)
    parser.set_defaults(command=run, parser=parser)


def _add_what(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is run")
    what.add_argument(
        "--levels",
        type=name_list,
        help="opt levels, with commas between (default: O0,O1,O2,O3, or O0,O1 for a script that "
        "never says which module is its model)",
    )
    what.add_argument(
        "--dtypes",
        type=name_list,
        help="half dtypes: float16,bfloat16 (default: those that ampatch doctor calls fast "
        "here, or bfloat16)",
    )
    what.add_argument(
        "--with",
        dest="overrides",
        action="append",
        default=[],
        metavar='"LEVEL NAME=VALUE ..."',
        help='one more row, with settings of initialize: "O2 loss_scale=128"',
    )
    what.add_argument(
        "--no-autocast",
        dest="autocast",
        action="store_false",
        help="leave out the rows of torch.autocast and GradScaler, or of a script that uses them "
        "itself as it is",
    )
    what.add_argument(
        "--auto",
        action="store_true",
        help="as by default: a script without AMP code is recognized",
    )
    what.add_argument(
        "--seeds",
        type=positive_count,
        default=1,
        metavar="N",
        help="run each row with seeds 0 to N-1; accuracy is tested from 2 on (default: 1)",
    )
    what.add_argument(
        "--override-seeds",
        action="store_true",
        help="where SCRIPT seeds torch, numpy or random itself, use the trial's seed instead",
    )
    what.add_argument(
        "--repeats",
        type=positive_count,
        default=1,
        metavar="N",
        help="run each seed N times (default: 1)",
    )
    what.add_argument(
        "--rounds",
        type=positive_count,
        default=3,
        metavar="N",
        help="measure speed in N rounds at least: each seed is one, short ones are added; with "
        "--resume N may grow (default: 3)",
    )
    what.add_argument(
        "--steps", type=positive_count, metavar="N", help="end each run after N optimizer steps"
    )


def _add_measures(parser: argparse.ArgumentParser) -> None:
    measures = parser.add_argument_group("what is measured")
    measures.add_argument(
        "--metric",
        type=name_and_value,
        action="append",
        default=[],
        metavar="NAME=REGEX",
        help=r"a number in the script's output, such as 'accuracy=acc: (\S+)'; scripts that "
        "call ampatch.log_metrics(accuracy=...) need none",
    )
    measures.add_argument(
        "--judge",
        metavar="NAME",
        help='what the verdict is about: a metric or "last loss" (default: the first metric)',
    )
    measures.add_argument(
        "--margin",
        metavar="NUMBER|PERCENT%",
        help="the smallest difference from O0 that matters in what is judged; a row is recommended "
        "only if the test would have seen one (default: 1%% of O0's value)",
    )
    measures.add_argument(
        "--better",
        type=name_and_value,
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
        type=positive_seconds,
        metavar="SECONDS",
        help="end a run that takes longer, and go on with the next",
    )
    add_trackers(how)


def _add_where(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("which machines and devices")
    where.add_argument(
        "--devices",
        type=name_list,
        metavar="cuda:0,cuda:1",
        help="give each trial one of these; timed trials run alone, on the first",
    )
    where.add_argument(
        "--jobs",
        type=positive_count,
        metavar="N",
        help="run N trials at a time, for accuracy; timed trials run alone",
    )
    where.add_argument(
        "--engine",
        default="local",
        metavar="local|ray|slurm",
        help="what runs the trials (default: local; the others need ampatch[ray], ampatch[slurm])",
    )
    where.add_argument(
        "--address",
        help="of a Ray cluster; auto finds a running one (default: Ray is started here)",
    )
    where.add_argument(
        "--gpus-per-trial",
        type=float,
        metavar="N",
        help="what a trial asks of the cluster (default: with Ray 1 a process where it has GPUs)",
    )
    where.add_argument(
        "--cpus-per-trial",
        type=positive_count,
        metavar="N",
        help="cores, and threads of a trial (default: with Ray a node's, or 1 beside GPUs)",
    )
    where.add_argument(
        "--slurm",
        type=name_and_value,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter for submitit, such as partition=gpu or timeout_min=120",
    )
    where.add_argument(
        "--nproc-per-node",
        type=positive_count,
        metavar="N",
        help="start each trial by torchrun with N processes; rank 0 reports",
    )


def run(options: argparse.Namespace) -> int:
    """Run the sweep, print and write its results; returns the exit code."""
    from ampatch.sweep import SweepError
    from ampatch.sweep.execution.progress import progress_on

    trackers = check_trackers(options)
    sweep = _sweep(options)
    stopped, code = "", 0
    try:
        if not sweep.runs:  # a sweep that goes on keeps what its first trials had
            native_first.build()
        sweep.run(progress_on(sys.stderr, options.steps))
    except KeyboardInterrupt:
        stopped, code = "Interrupted; --resume goes on.", 130
    except OSError as error:
        stopped, code = f"{error}. With that put right, --resume goes on.", 1
    except SweepError as error:
        stopped, code = f"Stopped: {error}", 1
    return _report(sweep, stopped, trackers) or code


def _sweep(options: argparse.Namespace) -> Sweep:
    """The sweep that the options describe; a wrong option ends the command."""
    from ampatch.sweep import Sweep

    parser: argparse.ArgumentParser = options.parser
    program = program_of(options)
    refuse_launcher(options, program, advice=" --nproc-per-node N")
    try:
        return Sweep(
            program.name,
            options.arguments,
            module=program.is_module,
            levels=options.levels,
            dtypes=options.dtypes,
            seeds=options.seeds,
            override_seeds=options.override_seeds,
            repeats=options.repeats,
            rounds=options.rounds,
            steps=options.steps,
            overrides=options.overrides,
            metrics=dict(options.metric),
            judge=options.judge,
            margin=options.margin,
            better=dict(options.better),
            autocast=options.autocast,
            auto=options.auto,
            out=options.out,
            timeout=options.timeout,
            engine=options.engine,
            devices=options.devices,
            jobs=options.jobs,
            address=options.address,
            gpus_per_trial=options.gpus_per_trial,
            cpus_per_trial=options.cpus_per_trial,
            slurm=dict(options.slurm),
            nproc_per_node=options.nproc_per_node,
            resume=options.resume,
            overwrite=options.overwrite,
        )
    except OSError as error:
        parser.error(cause(error))
    except (ImportError, ValueError) as error:
        parser.error(str(error))


def _report(sweep: Sweep, stopped: str, trackers: list[str]) -> int:
    """Print and write the results so far; returns 1 if no run went well."""
    from ampatch.sweep.report.terminal import write_results

    results = sweep.results
    write_results(results, sys.stdout, told={case.label for case in sweep.told})
    try:
        write_shown(sweep.directory, trackers)
    except OSError as error:
        print(f"The report could not be written: {error}", file=sys.stderr)
        return 1
    if stopped:
        left = results.planned - results.done
        print(f"{stopped}\n{left} of {results.planned} runs are missing.", file=sys.stderr)
        return 0
    return 0 if any(row.good_runs for row in results.rows) else 1
