"""All benchmarks: each measures one thing, and prints its tables in Markdown.

    python benchmarks/run.py NAME ... [--out FILE.md] [options of NAME]
    python benchmarks/run.py --list

`speed` stands for every table of speed.py.  A table carries date, machine and versions.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import speed
import torch
from detection import DETECTORS
from measuring import command, machine
from realistic import REALISTIC
from tasks import ON_A_DEVICE, TASKS

HALF_DTYPES = ("float16", "bfloat16")
MODELS = (*TASKS, *REALISTIC, *ON_A_DEVICE, *DETECTORS)


def positive(text: str) -> int:
    """A number of 1 or more."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def place(text: str) -> Path:
    """A file in a folder that is there."""
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {Path(text).parent}")
    return Path(text)


FLAGS: dict[str, dict[str, Any]] = {
    "models": {"nargs": "+", "metavar": "MODEL", "choices": MODELS},
    "systems": {"nargs": "+", "metavar": "SYSTEM", "help": "the first is the reference"},
    "rounds": {"type": int},
    "seconds": {"type": float, "help": "of each system's turn"},
    "steps": {"type": positive},
    "warm-up": {"type": positive, "help": "steps before"},
    "seeds": {"type": positive, "help": "runs per row"},
    "dtype": {"choices": HALF_DTYPES},
    "dtypes": {"nargs": "+", "choices": HALF_DTYPES},
    "device": {},
    "evaluate": {"action": "store_true", "default": None, "help": "without gradients"},
    "small": {"action": "store_true", "default": None, "help": "tiny shapes"},
    "wide": {"action": "store_true", "default": None, "help": "models of their own width"},
    "fused": {"action": argparse.BooleanOptionalAction, "help": "the optimizer"},
    "compile": {"nargs": "*", "metavar": "SYSTEM", "help": "in the last dtype"},
    "optimizers": {"nargs": "+", "choices": ("fused", "ordinary")},
    "tasks": {"nargs": "+", "choices": ("digits", "breast_cancer", "diabetes", "characters")},
}


class Mode(NamedTuple):
    """What a name measures, where, and which options it takes, with their defaults."""

    about: str
    report: str  # module:function
    flags: dict[str, Any] = {}  # noqa: RUF012
    told: str = ""  # under the title, with the options' values; nothing: no head

    def pieces(self, name: str, options: argparse.Namespace) -> Iterator[str]:
        """What is printed, bit by bit."""
        if self.told:
            how = self.told.format(**vars(options))
            yield f"# {self.about}\n\n{how}\n{machine()}.\n\n    {command()}\n"
        module, _, function = self.report.partition(":")
        report = getattr(importlib.import_module(module), function)
        yield from report(name, options) if module == "speed" else report(options)


SPEED = Mode(
    "Speed of a step beside that of the first column",
    "speed:report",
    {"models": None, "systems": None, "rounds": 31, "seconds": 0.02, "dtype": "bfloat16"},
    "{dtype}, CPU, one thread: median and quartiles of {rounds} interleaved rounds, {seconds} s "
    "per turn. Above 1 is faster than the first column (autocast: with a GradScaler). SGD, "
    "for models of users' sizes AdamW; dynamic loss scaling wherever there is one, static 1 at "
    "O3; `levels`: momentum, each level's own.",
)
MODES: dict[str, Mode] = {
    **dict.fromkeys(speed.TABLES, SPEED),
    "counts": Mode(
        "Operators / casts / host syncs / Python calls per training step",
        "counts:report",
        {"models": None, "dtype": "bfloat16"},
        "Exact. torch.{dtype}, SGD.",
    ),
    "way": Mode(
        "Calls of ampatch's functions, and the files that they are in",
        "way:report",
        {},
        "Exact. One Linear in float16, in Python, after four steps.",
    ),
    "native": Mode(
        "What each function of the native part gives",
        "native_entries:report",
        {"models": None, "rounds": 15, "seconds": 0.02, "dtype": "bfloat16"},
        "{dtype}, CPU, one thread: a step's time with the twin in Python in a function's place "
        "over that with it; medians of {rounds} rounds, geometric means over the models.",
    ),
    "memory": Mode(
        "Peak tensor memory of a training step",
        "counts:memory",
        {"models": None, "dtype": "bfloat16"},
        "Relative to autocast + GradScaler, torch.{dtype}, Adam, counted.",
    ),
    "accelerator": Mode(
        "What a step asks of a device",
        "accelerator:report",
        {
            "models": None,
            "dtypes": HALF_DTYPES,
            "optimizers": ("fused", "ordinary"),
            "wide": False,
        },
        "Per training step of AdamW on a fake accelerator: launches, of them casts of one tensor "
        "and copies of lists; host waits; copies between host and device.",
    ),
    "gpu": Mode(
        "Training on a device beside autocast + GradScaler",
        "gpu:report",
        {
            **{"models": None, "systems": None, "dtypes": HALF_DTYPES, "rounds": 5, "steps": 10},
            **{"compile": ("autocast", "O1", "O2"), "warm-up": 5, "fused": True, "small": False},
            **{"evaluate": False},
            **{"device": "cuda"},
        },
        "AdamW, fused: {fused}.",
    ),
    "accuracy": Mode(
        "Held-out results of O0 to O3 and autocast on four tasks: the page docs/accuracy.md",
        "accuracy:report",
        {"tasks": None, "seeds": 8, "steps": None},
    ),
    "figures": Mode("Draws the figures of docs/ from the committed results", "figures:report"),
}


def listing() -> str:
    """A line per name."""
    lines = []
    for name, mode in MODES.items():
        about = speed.TABLES[name].title if name in speed.TABLES else mode.about
        lines.append(f"{name:16} {about}\n{'':17}{' '.join(f'--{flag}' for flag in mode.flags)}")
    return "\n".join(lines)


def chosen(mode: Mode, flags: dict[str, Any], parser: argparse.ArgumentParser) -> Any:
    """The options of one mode: what was given, else its defaults."""
    if wrong := [flag for flag in flags if flag not in mode.flags]:
        parser.error(
            f"{mode.about}: it takes no --{wrong[0]}, but {' '.join(mode.flags) or 'none'}"
        )
    values = {**mode.flags, **flags}
    return argparse.Namespace(**{flag.replace("-", "_"): value for flag, value in values.items()})


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to measure, see --list")
    parser.add_argument("--list", action="store_true", help="the names, and the options of each")
    parser.add_argument("--out", type=place, metavar="FILE", help="write the tables there too")
    for flag, settings in FLAGS.items():
        parser.add_argument(f"--{flag}", **settings)
    options = vars(parser.parse_args())
    if options["list"] or not options["names"]:
        print(listing())
        return
    names = [name for n in options["names"] for name in (speed.TABLES if n == "speed" else [n])]
    if unknown := [name for name in names if name not in MODES]:
        parser.error(f"there is no benchmark {unknown[0]}; --list names them")
    flags = {flag: options[flag.replace("-", "_")] for flag in FLAGS}
    flags = {flag: value for flag, value in flags.items() if value is not None}
    plans = [(name, chosen(MODES[name], flags, parser)) for name in names]
    torch.set_num_threads(1)
    page: list[str] = []
    try:
        for name, plan in plans:
            for piece in MODES[name].pieces(name, plan):
                if piece not in page:  # the head of tables of one kind
                    print(piece, flush=True)
                    page.append(piece)
    finally:
        if options["out"] is not None:
            options["out"].write_text("\n".join(page))


if __name__ == "__main__":
    sys.exit(main())
