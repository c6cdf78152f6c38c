"""The command `ampatch`: sweep, run, tables, doctor.

What a subcommand needs is imported when it runs, so that a wrong option is
refused at once.  Exit codes: 0, or 1 when no run of a sweep went well, or the
script's own; 2 for a wrong command line; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ampatch._version import __version__

VARIABLES = ("AMPATCH_OPT_LEVEL", "AMPATCH_DTYPE", "AMPATCH_ENABLED")
TABLES = ("WHITELIST", "BLACKLIST", "PROMOTE", "BANNED")
MEASURE_FOR = 0.15  # seconds for each operator and dtype in `ampatch doctor`


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default the process's own; returns the exit code."""
    own, script_arguments = _split(list(sys.argv[1:] if argv is None else argv))
    options, unknown = build_parser().parse_known_args(own)
    if unknown:
        hint = ""
        if options.command is sweep_command:
            hint = (
                "\nThe script's own arguments go behind --: "
                f"ampatch sweep {options.script} -- {' '.join(unknown)}"
            )
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    options.arguments = script_arguments
    return options.command(options)


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What is for us, and what is for the script: argparse would mix the two.

    Behind `sweep` the script's part begins at `--`, behind `run` after SCRIPT.
    """
    if argv[:1] == ["sweep"] and "--" in argv:
        cut = argv.index("--")
        return argv[:cut], argv[cut + 1 :]
    if argv[:1] == ["run"]:
        cut = 1
        while cut < len(argv) and argv[cut].startswith("-"):
            cut += 2 if argv[cut] in ("--opt-level", "--dtype") else 1
        return argv[: cut + 1], argv[cut + 1 :]
    return argv, []


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ampatch", description="Automatic mixed precision for PyTorch, by patching it."
    )
    parser.add_argument("--version", action="version", version=f"ampatch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_sweep(commands)
    _add_run(commands)
    _add_tables(commands)
    _add_doctor(commands)
    return parser


def _add_sweep(commands: Any) -> None:
    parser = commands.add_parser(
        "sweep",
        help="run a script at several opt levels and compare them",
        usage="ampatch sweep SCRIPT [options] [-- SCRIPT ARGUMENTS]",
        description="Runs SCRIPT once per opt level and half dtype, each in a fresh process, "
        "and prints a table. SCRIPT is not edited: its ampatch.initialize takes opt level and "
        "dtype from AMPATCH_OPT_LEVEL and AMPATCH_DTYPE. O0 runs once.",
    )
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument(
        "--levels",
        type=_names,
        default=["O0", "O1", "O2", "O3"],
        help="opt levels, with commas between (default: O0,O1,O2,O3)",
    )
    parser.add_argument(
        "--dtypes",
        type=_names,
        default=["float16"],
        help="half dtypes: float16,bfloat16 (default: float16)",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="for sweep.json, records and logs (default: ampatch-sweep/ and the "
        "script's name); an earlier sweep there is replaced",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="end a run that takes longer, and go on with the next",
    )
    parser.set_defaults(command=sweep_command, parser=parser)


def _add_run(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="run one script at a given opt level",
        usage="ampatch run [options] SCRIPT [SCRIPT ARGUMENTS]",
        description="Runs SCRIPT as Python would, with what its ampatch.initialize is given "
        "replaced. Options come before SCRIPT.",
    )
    parser.add_argument("--opt-level", metavar="LEVEL", help="sets AMPATCH_OPT_LEVEL")
    parser.add_argument("--dtype", help="sets AMPATCH_DTYPE: float16 or bfloat16")
    parser.add_argument("script", metavar="SCRIPT")
    parser.set_defaults(command=run_command, parser=parser)


def _add_tables(commands: Any) -> None:
    parser = commands.add_parser("tables", help="which function gets which dtype, and why")
    parser.add_argument("--rule", help="only the rows with this rule, such as half or float")
    parser.set_defaults(command=tables_command, parser=parser)


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="versions, devices, and how fast half is here")
    parser.set_defaults(command=doctor_command, parser=parser)


# sweep and run


def sweep_command(options: argparse.Namespace) -> int:
    from ampatch.sweep import Sweep
    from ampatch.sweep.progress import progress_on
    from ampatch.sweep.summary import OK
    from ampatch.sweep.table import write_table

    try:
        plan = Sweep(
            options.script,
            options.arguments,
            levels=options.levels,
            dtypes=options.dtypes,
            out=options.out,
            timeout=options.timeout,
        )
    except (OSError, ValueError) as error:
        options.parser.error(str(error))
    interrupted = False
    try:
        plan.run(progress_on(sys.stderr))
    except KeyboardInterrupt:
        interrupted = True
        left = len(plan.cases) - len(plan.runs)
        print(f"Interrupted; {left} of {len(plan.cases)} runs are missing.", file=sys.stderr)
    write_table(plan.rows, sys.stdout)
    print(f"Written to {plan.table_file}; records and logs are beside it.")
    if interrupted:
        return 130
    return 0 if any(row.status == OK for row in plan.rows) else 1


def run_command(options: argparse.Namespace) -> int:
    from ampatch.sweep.script import check_script, run_script

    try:
        check_script(options.script)
    except (OSError, ValueError) as error:
        options.parser.error(str(error))
    for name, value in zip(VARIABLES, (options.opt_level, options.dtype)):
        if value is not None:
            os.environ[name] = value
    return run_script(options.script, options.arguments).exit_code


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _seconds(text: str) -> float:
    seconds = float(text)  # argparse makes an error message of the ValueError
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return seconds


# tables


def tables_command(options: argparse.Namespace) -> int:
    from ampatch.casting import tables

    rules = [rule.value for rule in tables.Rule]
    if options.rule not in (None, *rules):
        options.parser.error(f"unknown rule {options.rule!r}; expected one of {', '.join(rules)}")
    missing: list[str] = []
    for title in TABLES:
        rows = [row for row in getattr(tables, title) if options.rule in (None, row.rule.value)]
        if rows:
            print(f"{title}\n")
        for row in rows:
            print(_row_text(row))
            missing += [f"{row.where}.{name}" for name in row.names if not _exists(row.where, name)]
    lacks = ", ".join(missing) if missing else "nothing of these"
    print(textwrap.fill(f"This torch ({_version('torch')}) lacks {lacks}.", 88))
    return 0


def _row_text(row: Any) -> str:
    native = "; PyTorch does this itself" if row.native else ""
    names = textwrap.fill(
        " ".join(row.names),
        88,
        initial_indent="    ",
        subsequent_indent="    ",
        break_on_hyphens=False,
    )
    why = textwrap.fill(row.why, 88, initial_indent="  ", subsequent_indent="  ")
    return f"{row.rule.value}: {row.where}{native}\n{names}\n{why}\n"


def _exists(where: str, name: str) -> bool:
    """Whether this torch has `where.name`."""
    import torch
    import wrapt

    path = where.removeprefix("torch").lstrip(".")
    try:
        wrapt.resolve_path(torch, f"{path}.{name}".lstrip("."))
    except AttributeError:
        return False
    return True


# doctor


def doctor_command(options: argparse.Namespace) -> int:
    for name, value in _facts():
        print(f"{name:<22}{value}")
    print("\nSpeed relative to FP32, measured just now; below 1 is slower:")
    for device in _devices():
        for line in _speeds(device):
            print(f"  {line}")
    return 0


def _facts() -> Iterator[tuple[str, str]]:
    """What a report about a problem should begin with."""
    import torch

    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "ampatch", __version__
    for package in ("torch", "wrapt", "rich", "matplotlib"):
        yield package, _version(package)
    yield "cpu threads", str(torch.get_num_threads())
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield "cuda devices", ", ".join(gpus) or "none"
    yield "apex", _apex()
    for name in VARIABLES:
        yield name, os.environ.get(name, "not set")


def _apex() -> str:
    """Whether NVIDIA's apex, or something by its name, would be imported."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "not installed"
    return f"importable, from {spec.origin or 'a directory without __init__.py'}"


def _devices() -> list[str]:
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _speeds(device: str) -> Iterator[str]:
    """A line for each half type: how fast a matmul and a convolution are in it."""
    import torch

    single = [_time(run, device) for run in _operators(device, torch.float32)]
    for dtype in (torch.float16, torch.bfloat16):
        half = [_time(run, device) for run in _operators(device, dtype)]
        matmul, conv = (base / time for base, time in zip(single, half))
        yield (
            f"{device:<6}{str(dtype).removeprefix('torch.'):<10}"
            f"matmul {matmul:.2g}x   conv2d {conv:.2g}x"
        )


def _operators(device: str, dtype: Any) -> list[Callable[[], Any]]:
    import torch

    side = 256 if device == "cpu" else 4096
    square = torch.randn(side, side, device=device).to(dtype)
    batch = 4 if device == "cpu" else 128
    images = torch.randn(batch, 32, 28, 28, device=device).to(dtype)
    kernel = torch.randn(32, 32, 3, 3, device=device).to(dtype)
    return [
        lambda: square @ square,
        lambda: torch.nn.functional.conv2d(images, kernel, padding=1),
    ]


def _time(run: Callable[[], Any], device: str) -> float:
    """The shortest of the times that `run` takes within `MEASURE_FOR` seconds."""
    import torch

    def once() -> float:
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    end = time.perf_counter() + MEASURE_FOR
    best = once()
    while time.perf_counter() < end:
        best = min(best, once())
    return best


def _version(package: str) -> str:
    """The installed version of `package`, which need not have been imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
