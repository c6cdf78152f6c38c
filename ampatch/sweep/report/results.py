"""The results of a sweep and their files, for code that reads or draws them.

    DIR/summary.json       `Results`: settings, rows, recommendation; rewritten after each run
    DIR/summary.csv .md .tex  the table: see `result_files.py`
    DIR/report.html plots/ see `render.py`
    DIR/tensorboard/STEM/  event files, on request: see `trackers.py`
    DIR/runs/STEM.json     a `Run`, written when its process has ended
    DIR/runs/STEM.log      what the script printed
    DIR/runs/STEM.progress {"steps": 12, "loss": 0.5}, while the run is going on

STEM is `Trial.file_stem`, such as `O1-float16.seed0.repeat0`.  From Python:

    results = read_results("DIR")                 # Results
    for row in results.rows:                      # one per case
        for run in read_runs("DIR", row.label):   # its processes: seeds and rounds
            run.measured.losses["0"].values       # steps, values, seconds
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampatch.sweep.json_files import from_json, read_json
from ampatch.sweep.measure.run_record import FORMAT, OTHER_FORMAT, Run, read_run

SUMMARY = "summary.json"
RUNS = "runs"
PLOTS = "plots"
REPORT = "report.html"
TABLES = ("summary.csv", "summary.md", "summary.tex")
PICTURES = ("loss-by-step", "loss-by-time", "speed")
FORMATS = ("svg", "pdf", "png")
PICTURE_FILES = tuple(f"{PLOTS}/{name}.{form}" for name in PICTURES for form in FORMATS)
EVENTS = "tensorboard"
STEPS_DIFFER_PREFIX = "it took"  # how `Comparison.untested` begins if the numbers of steps differ


@dataclass(frozen=True)
class Spread:
    """A figure that was measured `n` times: its median, and its quartiles `low` and `high`."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Comparison:
    """One quantity of a row compared with O0's, with one value for each seed that both have.

    `difference` is the mean of the row's value minus O0's with the same seed, `scatter` the
    standard deviation of these differences, `low` to `high` the 95 % confidence interval of
    `difference` (not corrected for the number of rows).  `p` is the two-sided p value of the paired
    t test, `corrected_p` by Holm's method over all rows.  `smallest` is the smallest difference
    that the test would have found with probability 80 %.  `matters` is the margin: a smaller
    difference does not matter (`--margin`).  `outcome` is "within" (no difference was found),
    "better", "worse", "small" (worse by less than the margin), "different" (neither direction is
    known to be better) or "untested"; `untested` is the reason.
    """

    name: str  # "last loss", or the name of a metric
    better: str | None  # "higher" or "lower"; None if neither the name nor --better tells it
    n: int  # number of seeds
    mean: float
    sd: float | None
    base_mean: float
    base_sd: float | None
    difference: float
    matters: float = 0.0
    scatter: float | None = None
    p: float | None = None
    corrected_p: float | None = None
    low: float | None = None
    high: float | None = None
    smallest: float | None = None
    outcome: str = "untested"
    untested: str = ""

    @property
    def title(self) -> str:
        """The name with spaces for underscores, for use in sentences."""
        return self.name.replace("_", " ")

    @property
    def is_uneven(self) -> bool:
        """Whether it was not tested because the row and O0 took different numbers of steps."""
        return self.untested.startswith(STEPS_DIFFER_PREFIX)

    @property
    def has_no_verdict(self) -> bool:
        """Whether it differs from O0's, and neither direction is known to be better."""
        is_nonfinite = self.outcome == "worse"  # without a direction, only non-finite is worse
        return self.better is None and not is_nonfinite and bool(self.difference or self.scatter)


@dataclass(frozen=True)
class Row:
    """A case and the figures of all its runs; a figure is None if it was not measured.

    Losses and metrics are means over the full runs, memory is the maximum, skips are sums.
    `step_ms` and `cpu_ms` are medians of the medians of all runs, short ones too.  `status` is
    "ok", or what went wrong in the first failed run.
    """

    label: str
    opt_level: str  # includes "+tf32" and settings; "autocast" for the autocast baseline
    dtype: str
    engine: str = "ampatch"
    settings: dict[str, Any] = field(default_factory=dict)
    status: str = "ok"
    runs: int = 0  # number of runs that have ended
    good_runs: int = 0  # number of runs with status "ok"
    seeds: int = 0  # number of different seeds of these runs
    step_ms: float | None = None
    step_times: Spread | None = None  # milliseconds; n is the number of timed steps
    cpu_ms: float | None = None  # CPU time of all threads; None if the device is no CPU
    speed: float | None = None  # the median, relative to O0; above 1 is faster
    speeds: Spread | None = None  # n is the number of rounds; for O0: the speeds of its second runs
    cpu_speeds: Spread | None = None  # `speeds` by CPU time
    reach: float | None = None  # noise: by which factor two O0 runs of a round differ (`pace.py`)
    cpu_reach: float | None = None  # `reach` by CPU time
    pace: str = ""  # "faster", "slower", or why that is not known; "" if not compared
    by_cpu: bool = False  # whether CPU time decided on `pace`, instead of wall time
    memory_bytes: int | None = None
    memory_kind: str = "resident"  # "resident" or "device"
    first_loss: float | None = None
    last_loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # the last value of each metric
    sds: dict[str, float] = field(default_factory=dict)  # over seeds, of metrics and "last loss"
    better: dict[str, str | None] = field(default_factory=dict)  # direction of each metric and loss
    steps: int = 0  # in one run (the median)
    all_steps: int = 0  # in all full runs
    skipped: int = 0  # in all full runs
    loss_scale: float | None = None  # at the end of the first run
    seconds: float = 0.0  # of all processes together
    comparisons: list[Comparison] = field(default_factory=list)  # with O0; the judged one first
    outcome: str = "untested"  # "baseline", "failed", or an outcome of `Comparison`
    start: str = ""  # how a first loss differs from O0's (`first_loss_check.py`); "" if none does
    verdict: str = ""  # in words

    @property
    def name(self) -> str:
        """Level and dtype: `O1 float16`."""
        return f"{self.opt_level} {self.dtype}"

    @property
    def decisive(self) -> Spread:
        """The speeds, by CPU time or wall time, that decided on `pace`; the row must have one."""
        speeds = self.cpu_speeds if self.by_cpu else self.speeds
        assert speeds is not None
        return speeds


@dataclass
class Results:
    """The content of `summary.json`."""

    script: str
    arguments: list[str]
    started: str  # ISO 8601, UTC
    planned: int  # number of runs
    settings: dict[str, Any]  # settings that a resumed sweep must share
    versions: dict[str, str]
    machine: dict[str, str] = field(default_factory=dict)  # state: native part, load, threads
    rows: list[Row] = field(default_factory=list)
    done: int = 0  # number of runs that have ended
    recommendation: str = ""
    notes: list[str] = field(default_factory=list)  # what a reader should know about these figures
    provenance: dict[str, str] = field(default_factory=dict)  # command line, commit, ...
    plan: dict[str, Any] = field(default_factory=dict)  # what a resumed sweep continues from
    options: dict[str, Any] = field(default_factory=dict)  # given by the user; kept when resumed
    trials: list[str] = field(default_factory=list)  # file stems of trials that have run or may run
    files: list[str] = field(default_factory=list)  # further files, of a caller such as `tune`
    format: int = FORMAT

    @property
    def complete(self) -> bool:
        """Whether all planned runs have ended."""
        return self.done == self.planned

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "complete": self.complete}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Results:
        return from_json(cls, data)


@dataclass(frozen=True)
class StoredSweep:
    """A sweep as stored in its directory."""

    directory: Path
    results: Results
    runs: list[Run]


def read_results(directory: str | Path) -> Results | None:
    """The results in a sweep's directory; None if there are none.

    Raises `ValueError` for a damaged file, or one of another format or program.
    """
    path = Path(directory) / SUMMARY
    try:
        data = read_json(path)
    except ValueError:  # the file is no JSON
        data = {}
    if data is None:
        return None
    if not (isinstance(data, dict) and "format" in data and _has_bare_file_names(data)):
        raise ValueError(
            f"{path}: is damaged, or no sweep wrote it. Expected the results of ampatch sweep; for "
            "a new sweep choose another folder with --out."
        )
    if data["format"] != FORMAT:
        raise ValueError(f"{path}: in format {data['format']}. {OTHER_FORMAT}")
    return Results.from_json(data)


def _has_bare_file_names(data: dict) -> bool:
    """Whether no name has a folder: --overwrite deletes these files, in this folder only."""
    names = (*data.get("trials", ()), *data.get("files", ()))
    return all(Path(name).name == name for name in names)


def read_runs(directory: str | Path, label: str | None = None) -> Iterator[Run]:
    """The runs of a sweep in the order of their file names; with `label` the runs of one row.

    A run whose file is cut off is left out, with a warning.
    """
    results = read_results(directory)
    for stem in sorted(results.trials if results else ()):
        run = read_run(Path(directory) / RUNS / f"{stem}.json")
        if run is not None and label in (None, run.case.label):
            yield run


def read_sweep(directory: str | Path) -> StoredSweep:
    """The sweep in a directory, with the runs of its rows.

    Raises `FileNotFoundError` if there is none, `ValueError` for files in another format.
    """
    path = Path(directory)
    results = read_results(path)
    if results is None:
        raise FileNotFoundError(
            f"{path}: there are no results of a sweep in this directory. Expected one that ampatch "
            "sweep wrote to, with a file summary.json."
        )
    runs = list(read_runs(path))
    labels = {row.label for row in results.rows}
    results = dataclasses.replace(results, done=min(results.done, len(runs)))
    return StoredSweep(path, results, [run for run in runs if run.case.label in labels])
