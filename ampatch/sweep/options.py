"""The options of a sweep, in one table for the command line, Python and the documentation."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ampatch.config.validation import positive_number, whole_number
from ampatch.errors import did_you_mean

ROUNDS = 3
ENGINES = ("local", "ray")
SHORT_DTYPES = {"fp16": "float16", "half": "float16", "bf16": "bfloat16"}
NOT_RECORDED = ("out", "resume", "overwrite")  # options that do not change how trials run
SIZE_OPTIONS = ("seeds", "rounds", "budget")  # options that a resumed sweep has in its plan


def _option(
    metavar: str | None = None,
    *,
    parse: Callable[[str], Any] = str,
    flag: str = "",
    first: bool = False,
    only_for: tuple[str, ...] = ENGINES,
    fixed: bool = False,
) -> dict[str, Any]:
    """The metadata of a field that is an option of `ampatch sweep`; `flag` defaults to its name.

    `first` options are shown among those for a first sweep.  `only_for` are the engines that have
    the option.  A resumed sweep must have the same value of `fixed` options.
    """
    return {
        "metavar": metavar, "parse": parse, "flag": flag, "first": first, "only_for": only_for,
        "fixed": fixed,
    }  # fmt: skip


@dataclass(kw_only=True)
class SweepOptions:
    r"""How a sweep runs: its fields are the options of `ampatch sweep`, with this text as help.

    A field that is true by default has the help of its `--no-` flag.
    A list of names may be one string with commas; NAME=VALUE of the command line is a dictionary.
    Raises `TypeError` or `ValueError` for wrong values.

    Attributes:
        module: the script is the name of a module, as with python -m
        rows: cases to run, instead of levels and dtypes
        kind: the kind of script, if known (default: the first run at O0 finds out)
        fail_fast: after a failed run a row has no further runs
        fewer_seeds: the number of seeds of rows with fewer seeds than the others, by case
        probe: a module and a string; before the script each trial calls its
            start(text, autocast_off, writes), where `writes` is true on the first rank
        files: names of files that the caller adds to the folder of the sweep
        tuning: the options of `ampatch tune` if it runs the sweep, for the record
        levels: some of O0,O1,O2,O3 (default: all that can run)
        dtypes: float16,bfloat16 (default: those that are fast)
        seeds: run seeds 0 to N-1 (default: as time allows)
        budget: time limit (default: 10; none with --seeds)
        metrics: search the output: 'accuracy=acc: (\S+)'
        margin: the difference from O0 that matters (default: 1%)
        out: folder of results (default: ampatch-sweep/NAME)
        resume: continue the sweep in the folder
        overwrite: replace the sweep in the folder
        overrides: add a row with settings: "O2 loss_scale=128"
        autocast: leave out the rows of torch.autocast
        override_seeds: derive the script's own seeds from the trial's
        rounds: measure speed in at least N rounds (default: 3)
        steps: end each run after N optimizer steps
        judge: the metric to compare (default: the first one)
        better: NAME=lower or NAME=higher (default: NAME decides)
        timeout: end a run that takes longer, and continue
        devices: run one trial at a time on each device
        jobs: run N trials for accuracy at a time
        nproc_per_node: start each trial with torchrun
        in_copy: run each trial in a copy of the folder; --no-in-copy: in the folder
        cold: start a new Python for each trial
        engine: run trials on this machine, or on Ray
        address: address of a Ray cluster; auto finds a running one
        gpus_per_trial: GPUs on Ray (default: 1 per process)
        cpus_per_trial: CPUs on Ray (default: 1 with GPUs, else all)
    """

    module: bool = False
    rows: Sequence[Any] | None = None
    kind: Any = None
    fail_fast: bool = False
    fewer_seeds: dict[Any, int] = field(default_factory=dict)
    probe: tuple[str, str] | None = None
    files: Sequence[str] = ()
    tuning: dict[str, Any] = field(default_factory=dict)
    levels: list[str] | None = field(default=None, metadata=_option(first=True))
    dtypes: list[str] | None = field(default=None, metadata=_option(first=True))
    seeds: int | None = field(default=None, metadata=_option("N", parse=int, first=True))
    budget: float | None = field(
        default=None, metadata=_option("MINUTES", parse=float, first=True, only_for=("local",))
    )
    metrics: dict[str, str] = field(
        default_factory=dict, metadata=_option("NAME=REGEX", flag="--metric", first=True)
    )
    margin: str | None = field(default=None, metadata=_option("NUMBER|PERCENT%", first=True))
    out: Any = field(default=None, metadata=_option("DIR", first=True))
    resume: bool = field(default=False, metadata=_option(first=True))
    overwrite: bool = field(default=False, metadata=_option(first=True))
    overrides: list[str] = field(default_factory=list, metadata=_option("ROW", flag="--with"))
    autocast: bool = field(default=True, metadata=_option())
    override_seeds: bool = field(default=False, metadata=_option(fixed=True))
    rounds: int | None = field(default=None, metadata=_option("N", parse=int))
    steps: int | None = field(default=None, metadata=_option("N", parse=int, fixed=True))
    judge: str | None = field(default=None, metadata=_option("NAME"))
    better: dict[str, str] = field(default_factory=dict, metadata=_option("NAME=WAY"))
    timeout: float | None = field(default=None, metadata=_option("SECONDS", parse=float))
    devices: tuple[str, ...] = field(
        default=(), metadata=_option("cuda:0,cuda:1", only_for=("local",))
    )
    jobs: int | None = field(default=None, metadata=_option("N", parse=int))
    nproc_per_node: int | None = field(default=None, metadata=_option("N", parse=int, fixed=True))
    in_copy: bool | None = field(default=None, metadata=_option(parse=bool, only_for=("local",)))
    cold: bool = field(default=False, metadata=_option())
    engine: str = field(default="local", metadata=_option("|".join(ENGINES)))
    address: str | None = field(default=None, metadata=_option(only_for=("ray",)))
    gpus_per_trial: float | None = field(
        default=None, metadata=_option("N", parse=float, only_for=("ray",))
    )
    cpus_per_trial: int | None = field(
        default=None, metadata=_option("N", parse=int, only_for=("ray",))
    )

    def __post_init__(self) -> None:
        self.levels, self.dtypes = _names(self.levels), _names(self.dtypes)
        if self.dtypes is not None:
            self.dtypes = [SHORT_DTYPES.get(name, name) for name in self.dtypes]
        self.devices = tuple(_names(self.devices) or ())
        self.overrides = [self.overrides] if isinstance(self.overrides, str) else [*self.overrides]
        self.metrics, self.better = dict(self.metrics or {}), dict(self.better or {})
        if self.rows is not None and (self.levels or self.dtypes or self.overrides):
            raise ValueError(
                "sweep(rows=...): expected the cases alone, without levels, dtypes and overrides."
            )
        self._check_folder()
        self._check_numbers()
        self._check_metrics()
        self._check_engine()

    @property
    def side_by_side(self) -> bool:
        """Whether trials may run at the same time."""
        if self.engine != "local":
            return self.jobs != 1
        return max(len(self.devices) // (self.nproc_per_node or 1), self.jobs or 1) > 1

    @property
    def runs_in_copies(self) -> bool:
        """Whether each trial runs in a copy of the current folder."""
        default = self.side_by_side and self.engine == "local"
        return default if self.in_copy is None else self.in_copy

    def fixed_on_resume(self) -> dict[str, Any]:
        """The options that must be the same in a resumed sweep."""
        names = [option.name for option in dataclasses.fields(self) if option.metadata.get("fixed")]
        return {**{name: getattr(self, name) for name in names}, "side_by_side": self.side_by_side}

    def to_record(self, names: Iterable[str]) -> dict[str, Any]:
        """The options of these names that are recorded, as JSON values."""
        recorded = {"tuning"} | {option.name for option in command_options()} - set(NOT_RECORDED)
        values = {name: getattr(self, name) for name in names if name in recorded}
        if "devices" in values:
            values["devices"] = list(self.devices)
        return {name: value for name, value in values.items() if value not in (None, [], {})}

    def _check_folder(self) -> None:
        if self.out is not None and not str(self.out).strip():
            raise ValueError(
                "--out '': expected the name of a folder. Is the variable that holds it empty?"
            )
        if self.resume and self.overwrite:
            raise ValueError(
                "--resume and --overwrite: give one of them. --resume keeps what has run, "
                "--overwrite deletes it."
            )

    def _check_numbers(self) -> None:
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            if value is not None and option.metadata.get("parse") is int:
                whole_number(f"{flag(option)} {value}", value, least=1)
        if self.timeout is not None:
            positive_number(f"--timeout {self.timeout}", self.timeout, "seconds")
        if self.budget is not None:
            positive_number(f"--budget {self.budget}", self.budget, "minutes")
            if self.side_by_side:
                raise ValueError(
                    "--budget: expected trials that run one at a time, because the plan is made "
                    "from their times. Leave --budget or --jobs and --devices out."
                )
        if self.gpus_per_trial is not None and self.gpus_per_trial < 0:
            raise ValueError(f"--gpus-per-trial {self.gpus_per_trial:g}: expected 0 or more.")

    def _check_metrics(self) -> None:
        for name, pattern in self.metrics.items():
            option = f"--metric {name}={pattern}"
            try:
                groups = re.compile(pattern).groups
            except re.error as error:
                raise ValueError(f"{option}: not a regular expression: {error}.") from None
            if groups != 1:
                raise ValueError(
                    f"{option}: expected one group in parentheses around the number, such as "
                    rf"{name}=accuracy (\S+); there are {groups}."
                )
        for name, way in self.better.items():
            if way not in ("lower", "higher"):
                raise ValueError(f"--better {name}={way}: expected lower or higher.")

    def _check_engine(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(
                f"--engine {self.engine}: there is no such engine.\n"
                f"Expected one of {', '.join(ENGINES)}.{did_you_mean(self.engine, ENGINES)}"
            )
        if self.engine == "ray" and importlib.util.find_spec("ray") is None:
            raise ValueError(
                "--engine ray: needs the package ray, which is not installed. "
                'pip install "ampatch[ray]"'
            )
        for option in dataclasses.fields(self):
            engines = option.metadata.get("only_for", ENGINES)
            if self.engine not in engines and getattr(self, option.name) not in (None, ()):
                raise ValueError(
                    f"{flag(option)}: has no meaning with --engine {self.engine}, only with "
                    f"{' and '.join(engines)}."
                )
        if self.jobs is not None and self.devices:
            raise ValueError(
                "--jobs and --devices: give one of them. With --devices there is one trial at a "
                "time on each device; --jobs is for trials side by side on a CPU."
            )


def command_options() -> list[dataclasses.Field[Any]]:
    """The fields that are options of `ampatch sweep`, in their order."""
    return [option for option in dataclasses.fields(SweepOptions) if option.metadata]


def resumed_options(
    earlier: Any, options: Mapping[str, Any], new: Mapping[str, Any], arguments: Sequence[str],
    not_kept: Sequence[str] = (),
) -> tuple[str, dict[str, Any], dict[str, Any]]:  # fmt: skip
    """For a resumed sweep: a note on the options it keeps, the options to record, and to use.

    `options` are the options of this call, `new` the recorded ones among these, `arguments` the
    arguments of the script.  `SIZE_OPTIONS` with their earlier value are not used, because the plan
    has them.  Options in `not_kept` keep no earlier value.
    """
    from ampatch.config.opt_levels import LEVELS  # imports torch, which the command line avoids

    rows, recorded = earlier.settings.get("rows", ()), earlier.options
    levels = [level for level in LEVELS if any(row.startswith(level) for row in rows)]
    earlier_options = {"levels": levels, "dtypes": earlier.settings["dtypes"], **recorded}
    kept = {
        name: value
        for name, value in earlier_options.items()
        if (name in recorded or name in new) and name not in not_kept
    }
    merged = _merged(kept, new)
    new_sizes = {name for name in SIZE_OPTIONS if name in new and new[name] != kept.get(name)}
    if new_sizes and "budget" not in new_sizes:
        merged.pop("budget", None)
    new_tuning = new.get("tuning", ())
    tuning = {
        name: value for name, value in merged.get("tuning", {}).items() if name not in new_tuning
    }
    unchanged = {name: merged[name] for name in merged if name not in new}
    line = as_command_line(unchanged | {"tuning": tuning})
    if earlier.arguments and not arguments:
        line = f"{line} {shlex.join(['--', *earlier.arguments])}".strip()
    subject = "tuning" if "tuning" in merged else "sweep"
    note = f"Resumes the {subject} in its folder, and keeps its settings: {line}."
    unsized = {name: options[name] for name in options if name not in SIZE_OPTIONS}
    used = {
        name: value
        for name, value in merged.items()
        if name in new_sizes or name not in SIZE_OPTIONS
    }
    return note if line else "", merged, {**unsized, **used}


def _merged(kept: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Both sets of options; lists and dictionaries are joined, other values come from `new`."""
    merged = {**kept, **new}
    for name in kept.keys() & new.keys():
        if isinstance(new[name], dict):
            merged[name] = {**kept[name], **new[name]}
        elif isinstance(new[name], list):
            merged[name] = list(dict.fromkeys([*kept[name], *new[name]]))
    return merged


def as_command_line(options: Mapping[str, Any]) -> str:
    """Recorded options, written as on the command line."""
    words: list[str] = []
    for name, value in options.get("tuning", {}).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    for option in command_options():
        value = options.get(option.name)
        if isinstance(value, dict):
            values = [f"{name}={text}" for name, text in value.items()]
        elif isinstance(value, list):
            values = value if option.name == "overrides" else [",".join(value)]
        else:
            values = [] if value is None else [value]
        for text in values:
            name = flag(option)
            if option.default is None and text is False:
                name = name.replace("--", "--no-")
            words += [name] if isinstance(text, bool) else [name, str(text)]
    return shlex.join(words)


def flag(option: dataclasses.Field[Any]) -> str:
    """The flag of an option on the command line."""
    prefix = "--no-" if option.default is True else "--"
    return option.metadata.get("flag") or prefix + option.name.replace("_", "-")


def help_texts() -> dict[str, str]:
    """The description of each field in the docstring of `SweepOptions`."""
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", inspect.getdoc(SweepOptions) or "", re.M)
    return {name: " ".join(text.split()) for name, text in entries}


def _names(names: str | Iterable[str] | None) -> list[str] | None:
    """A list of names, from an iterable or from one string with commas."""
    if names is None:
        return None
    listed = names.split(",") if isinstance(names, str) else names
    return [name.strip() for name in listed if name.strip()]
