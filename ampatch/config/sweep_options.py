"""The options of a sweep: one table for the command line, for Python and for its documents."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import did_you_mean
from .validation import positive_number, whole_number

ROUNDS = 3
ENGINES = ("local", "ray")
GROUPS = RUN, MEASURES, HOW, WHERE = (
    "what is run",
    "what is measured",
    "where and how",
    "which machines and devices",
)


def _shown(
    group: str,
    metavar: str | None = None,
    *,
    parse: Callable[[str], Any] = str,
    flag: str = "",
    only_for: tuple[str, ...] = ENGINES,
    kept: bool = False,
) -> dict[str, Any]:
    """How `ampatch sweep` shows a field: as the option `flag`, by default named as the field is.

    `only_for` are the engines that it has a meaning for; a resumed sweep must share what is `kept`.
    """
    return {
        "group": group,
        "metavar": metavar,
        "parse": parse,
        "flag": flag,
        "only_for": only_for,
        "kept": kept,
    }


@dataclass(kw_only=True)
class SweepOptions:
    r"""How a sweep runs: its fields are the options of `ampatch sweep`, with this text as help.

    Names may be one text with commas between them; what is NAME=VALUE on the command line is a
    dictionary.  Raises `TypeError` or `ValueError` for wrong values.

    Attributes:
        module: the script is the name of a module, as with python -m
        rows: cases to run, in the place of levels, dtypes and what follows from them
        kind: what the script is, where that is known; by default the first run at O0 shows it
        fail_fast: a row of which a run has failed has no more of them
        fewer_seeds: by case the number of seeds of rows that have fewer than the others
        probe: a module, and a text; each trial calls start(text, off, writes) of it before
            the script; of several ranks the first writes
        levels: opt levels (default: O0,O1,O2,O3, or O0,O1 for a script that never says which
            module is its model)
        dtypes: half dtypes: float16,bfloat16 (default: those that ampatch doctor calls fast here,
            or bfloat16)
        overrides: one more row, with settings of initialize: "O2 loss_scale=128"
        autocast: rows of torch.autocast and GradScaler, or of a script that uses them itself as it
            is (there by default; --no-autocast leaves them out)
        seeds: run each row with seeds 0 to N-1; accuracy is tested from 2 on (default: as many as
            the budget has time for, 5 at most; 1 without a budget)
        override_seeds: where SCRIPT seeds torch, numpy or random itself, use the trial's seed
            instead
        rounds: measure speed in N rounds at least: each seed is one, short ones are added; when
            resumed N may grow (default: 3)
        budget: plan seeds, rounds and timed runs to take no more than so many minutes in all, with
            what has run before --resume; what is left out is said (default: 10 where neither seeds
            nor rounds are given and one trial runs at a time, else no limit)
        steps: end each run after N optimizer steps; with {steps} among its arguments the script
            gets the number instead, and ends by itself
        metrics: a number in the script's output, such as 'accuracy=acc: (\S+)'; scripts that call
            ampatch.log_metrics(accuracy=...) need none
        judge: what the verdict is about: a metric or "last loss" (default: the first metric)
        margin: the smallest difference from O0 that matters in what is judged; a row is recommended
            only if its 95 % interval ends within that (default: 1% of O0's value)
        better: which way a metric is better (default: as its name has it; loss and error are lower)
        out: for results and logs (default: ampatch-sweep/ and the script's name, numbered if there
            is one)
        resume: go on with the sweep in the directory
        overwrite: replace the sweep in the directory
        timeout: end a run that takes longer, and go on with the next
        devices: give each trial one of these; timed trials run alone, on the first
        jobs: run N trials at a time, for accuracy; timed trials run alone
        engine: what runs the trials (default: local; ray needs ampatch[ray])
        address: of a Ray cluster; auto finds a running one (default: Ray is started here)
        gpus_per_trial: what a trial asks of Ray (default: 1 a process where the cluster has GPUs)
        cpus_per_trial: cores, and threads of a trial (default: a node's, or 1 beside GPUs)
        nproc_per_node: start each trial by torchrun with N processes; rank 0 reports
    """

    module: bool = False
    rows: Sequence[Any] | None = None
    kind: Any = None
    fail_fast: bool = False
    fewer_seeds: dict[Any, int] = field(default_factory=dict)
    probe: tuple[str, str] | None = None
    levels: list[str] | None = field(default=None, metadata=_shown(RUN))
    dtypes: list[str] | None = field(default=None, metadata=_shown(RUN))
    overrides: list[str] = field(
        default_factory=list, metadata=_shown(RUN, '"LEVEL NAME=VALUE ..."', flag="--with")
    )
    autocast: bool = field(default=True, metadata=_shown(RUN))
    seeds: int | None = field(default=None, metadata=_shown(RUN, "N", parse=int))
    override_seeds: bool = field(default=False, metadata=_shown(RUN, kept=True))
    rounds: int | None = field(default=None, metadata=_shown(RUN, "N", parse=int))
    budget: float | None = field(
        default=None, metadata=_shown(RUN, "MINUTES", parse=float, only_for=("local",))
    )
    steps: int | None = field(default=None, metadata=_shown(RUN, "N", parse=int, kept=True))
    metrics: dict[str, str] = field(
        default_factory=dict, metadata=_shown(MEASURES, "NAME=REGEX", flag="--metric", kept=True)
    )
    judge: str | None = field(default=None, metadata=_shown(MEASURES, "NAME"))
    margin: str | None = field(default=None, metadata=_shown(MEASURES, "NUMBER|PERCENT%"))
    better: dict[str, str] = field(
        default_factory=dict, metadata=_shown(MEASURES, "NAME=lower|higher")
    )
    out: Any = field(default=None, metadata=_shown(HOW, "DIR"))
    resume: bool = field(default=False, metadata=_shown(HOW))
    overwrite: bool = field(default=False, metadata=_shown(HOW))
    timeout: float | None = field(default=None, metadata=_shown(HOW, "SECONDS", parse=float))
    devices: tuple[str, ...] = field(
        default=(), metadata=_shown(WHERE, "cuda:0,cuda:1", only_for=("local",))
    )
    jobs: int | None = field(default=None, metadata=_shown(WHERE, "N", parse=int))
    engine: str = field(default="local", metadata=_shown(WHERE, "|".join(ENGINES)))
    address: str | None = field(default=None, metadata=_shown(WHERE, only_for=("ray",)))
    gpus_per_trial: float | None = field(
        default=None, metadata=_shown(WHERE, "N", parse=float, only_for=("ray",))
    )
    cpus_per_trial: int | None = field(
        default=None, metadata=_shown(WHERE, "N", parse=int, only_for=("ray",))
    )
    nproc_per_node: int | None = field(
        default=None, metadata=_shown(WHERE, "N", parse=int, kept=True)
    )

    def __post_init__(self) -> None:
        self.levels, self.dtypes = _names(self.levels), _names(self.dtypes)
        self.devices = tuple(_names(self.devices) or ())
        self.overrides = [self.overrides] if isinstance(self.overrides, str) else [*self.overrides]
        self.metrics, self.better = dict(self.metrics or {}), dict(self.better or {})
        if self.rows is not None and (self.levels or self.dtypes or self.overrides):
            raise ValueError(
                "sweep(rows=...): expected the cases alone, without levels, dtypes and overrides."
            )
        self._check_numbers()
        self._check_metrics()
        self._check_engine()

    @property
    def side_by_side(self) -> bool:
        """Whether trials may run beside each other."""
        if self.engine != "local":
            return self.jobs != 1
        return max(len(self.devices) // (self.nproc_per_node or 1), self.jobs or 1) > 1

    def kept(self) -> dict[str, Any]:
        """The options that a resumed sweep must share."""
        names = [one.name for one in dataclasses.fields(self) if one.metadata.get("kept")]
        return {**{name: getattr(self, name) for name in names}, "side_by_side": self.side_by_side}

    def _check_numbers(self) -> None:
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if value is not None and one.metadata.get("parse") is int:
                whole_number(f"{flag(one)} {value}", value, least=1)
        if self.timeout is not None:
            positive_number(f"--timeout {self.timeout}", self.timeout, "seconds")
        if self.budget is not None:
            positive_number(f"--budget {self.budget}", self.budget, "minutes")
            if self.side_by_side:
                raise ValueError(
                    "--budget: expected trials that run one at a time, as their times are what is "
                    "planned with. Leave --budget or --jobs and --devices out."
                )
        if self.gpus_per_trial is not None and self.gpus_per_trial < 0:
            raise ValueError(f"--gpus-per-trial {self.gpus_per_trial:g}: expected 0 or more.")

    def _check_metrics(self) -> None:
        for name, pattern in self.metrics.items():
            said = f"--metric {name}={pattern}"
            try:
                groups = re.compile(pattern).groups
            except re.error as error:
                raise ValueError(f"{said}: no regular expression: {error}.") from None
            if groups != 1:
                raise ValueError(
                    f"{said}: expected one group in parentheses around the number, such as "
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
        for one in dataclasses.fields(self):
            engines = one.metadata.get("only_for", ENGINES)
            if self.engine not in engines and getattr(self, one.name) not in (None, ()):
                raise ValueError(
                    f"{flag(one)}: has no meaning with --engine {self.engine}, only with "
                    f"{' and '.join(engines)}."
                )
        if self.jobs is not None and self.devices:
            raise ValueError(
                "--jobs and --devices: give one of them. With --devices there is one trial at a "
                "time on each device; --jobs is for trials beside each other on a CPU."
            )


def of_command() -> list[dataclasses.Field[Any]]:
    """The fields that are options of `ampatch sweep`, in their order."""
    return [one for one in dataclasses.fields(SweepOptions) if one.metadata]


def flag(option: dataclasses.Field[Any]) -> str:
    """What an option is called on the command line."""
    given: str = option.metadata.get("flag", "")
    return given or f"--{'no-' * (option.default is True)}{option.name.replace('_', '-')}"


def help_texts() -> dict[str, str]:
    """What the text of `SweepOptions` says of each field."""
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", inspect.getdoc(SweepOptions) or "", re.M)
    return {name: " ".join(text.split()) for name, text in entries}


def _names(given: str | Iterable[str] | None) -> list[str] | None:
    """Names, given one by one or with commas between them."""
    if given is None:
        return None
    listed = given.split(",") if isinstance(given, str) else given
    return [name.strip() for name in listed if name.strip()]
