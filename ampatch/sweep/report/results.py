"""The results of a sweep, and where each of them is, for code that reads or draws them.

    DIR/summary.json       a `Results`: settings, rows, recommendation; rewritten after each run
    DIR/summary.csv .md .tex  the table: see `summary_files.py`
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

from ampatch.sweep.json_files import read_json, restored
from ampatch.sweep.measure.record import FORMAT, OTHER_FORMAT, Run, read_run

SUMMARY = "summary.json"
RUNS = "runs"
PLOTS = "plots"
REPORT = "report.html"
TABLES = ("summary.csv", "summary.md", "summary.tex")
PICTURES = ("loss-by-step", "loss-by-time", "speed")
FORMATS = ("svg", "pdf", "png")
DRAWN = tuple(f"{PLOTS}/{name}.{form}" for name in PICTURES for form in FORMATS)
EVENTS = "tensorboard"


@dataclass(frozen=True)
class Spread:
    """A figure that was measured `n` times: its median, and its quartiles `low` and `high`."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Comparison:
    """One quantity of a row beside O0's, over the seeds that both have: one value per seed.

    `difference` is the mean of the row's value less O0's with the same seed, `scatter` the
    standard deviation of these differences, `low` to `high` the 95 % confidence interval of
    `difference` (of this row by itself).  `p` is the two-sided probability by the paired t
    test, `corrected_p` by Holm's method over all rows.  `smallest` is the difference that the
    test would have found with probability 80 %.  `matters` is the margin: a smaller difference does
    not matter (`--margin`).  `outcome` is "within", "better", "worse", "small" (worse by less than
    the margin), "different" (which way is better is not known) or "untested"; `untested` says why.
    """

    name: str  # "last loss", or the metric's
    better: str | None  # "higher" or "lower"; None: neither its name nor --better says it
    n: int  # seeds
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
        """The name as a sentence has it."""
        return self.name.replace("_", " ")

    @property
    def is_uneven(self) -> bool:
        """Whether it was not tested because the two took different numbers of steps."""
        return self.untested.startswith("it took ")

    @property
    def has_no_verdict(self) -> bool:
        """Whether it differs from O0's, and which way is better is not known."""
        is_lost = self.outcome == "worse"  # no number, whichever way is better
        return self.better is None and not is_lost and bool(self.difference or self.scatter)


@dataclass(frozen=True)
class Row:
    """A case and the figures of all its runs.  None: not measured.

    Losses and metrics are means over the full runs, memory is the maximum, skips are sums.
    `step_ms` and `cpu_ms` are medians of the medians of all runs, short ones too.  `status` is
    "ok", or what went wrong in the first failed run.
    """

    label: str
    opt_level: str  # with "+tf32" and settings; "autocast" for the autocast baseline
    dtype: str
    engine: str = "ampatch"
    settings: dict[str, Any] = field(default_factory=dict)
    status: str = "ok"
    runs: int = 0  # processes that have ended
    good_runs: int = 0  # of these, the runs without a failure
    seeds: int = 0  # different seeds of these runs
    step_ms: float | None = None
    step_times: Spread | None = None  # milliseconds; n is the number of timed steps
    cpu_ms: float | None = None  # in all threads; None where the device is no CPU
    speed: float | None = None  # relative to O0, above 1 is faster: the median of `speeds`
    speeds: Spread | None = None  # n is the number of rounds; for O0 those of its second run
    cpu_speeds: Spread | None = None  # the same of CPU time
    reach: float | None = None  # the noise: the factor by which O0 differs from itself
    cpu_reach: float | None = None  # the same of CPU time
    pace: str = ""  # "faster", "slower", or why that is not known; "" if not compared
    by_cpu: bool = False  # CPU time decided on `pace`, not wall time
    memory_bytes: int | None = None
    memory_kind: str = "resident"  # "resident" or "device"
    first_loss: float | None = None
    last_loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # the last value of each
    sds: dict[str, float] = field(default_factory=dict)  # over seeds, of metrics and "last loss"
    better: dict[str, str | None] = field(default_factory=dict)  # "higher", "lower"; None: unknown
    steps: int = 0  # in one run (the median)
    all_steps: int = 0  # in all runs
    skipped: int = 0  # of all steps
    loss_scale: float | None = None  # at the end of the first run
    seconds: float = 0.0  # all its processes together
    comparisons: list[Comparison] = field(default_factory=list)  # with O0; the judged one first
    outcome: str = "untested"  # "baseline", "failed", or the outcome of the judged comparison
    start: str = ""  # how a first loss differs from O0's with the same seed; "": by rounding alone
    verdict: str = ""  # a sentence

    @property
    def name(self) -> str:
        """Level and dtype: `O1 float16`."""
        return f"{self.opt_level} {self.dtype}"

    @property
    def decisive(self) -> Spread:
        """The speeds that decided on the pace of a row that has one."""
        speeds = self.cpu_speeds if self.by_cpu else self.speeds
        assert speeds is not None
        return speeds


@dataclass
class Results:
    """The content of `summary.json`."""

    script: str
    arguments: list[str]
    started: str  # ISO 8601, UTC
    planned: int  # runs
    settings: dict[str, Any]  # a resumed sweep must have the same
    versions: dict[str, str]
    machine: dict[str, str] = field(default_factory=dict)  # its state: native part, load, threads
    rows: list[Row] = field(default_factory=list)
    done: int = 0  # runs that have ended
    recommendation: str = ""
    notes: list[str] = field(default_factory=list)  # what a reader should know about these figures
    provenance: dict[str, str] = field(default_factory=dict)  # command line, commit, versions, ...
    plan: dict[str, Any] = field(default_factory=dict)  # with which a resumed sweep continues
    options: dict[str, Any] = field(default_factory=dict)  # the user's; a resumed sweep keeps them
    trials: list[str] = field(default_factory=list)  # file names, without suffix, of all trials
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
        return restored(cls, data)


@dataclass(frozen=True)
class Stored:
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
    except ValueError:  # no JSON
        data = {}
    if data is None:
        return None
    if not (isinstance(data, dict) and "format" in data and _names_its_own(data)):
        raise ValueError(
            f"{path}: is damaged, or no sweep wrote it. Expected the results of ampatch sweep; for "
            "a new sweep choose another folder with --out."
        )
    if data["format"] != FORMAT:
        raise ValueError(f"{path}: in format {data['format']}. {OTHER_FORMAT}")
    return Results.from_json(data)


def _names_its_own(data: dict) -> bool:  # --overwrite deletes what a record names
    names = (*data.get("trials", ()), *data.get("files", ()))
    return all(Path(name).name == name for name in names)


def read_runs(directory: str | Path, label: str | None = None) -> Iterator[Run]:
    """The runs of a sweep, by file name; with `label` those of one row.

    A run whose file is cut off is left out, with a warning.
    """
    results = read_results(directory)
    for stem in sorted(results.trials if results else ()):
        run = read_run(Path(directory) / RUNS / f"{stem}.json")
        if run is not None and label in (None, run.case.label):
            yield run


def read_sweep(directory: str | Path) -> Stored:
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
    runs, labels = list(read_runs(path)), {row.label for row in results.rows}
    results = dataclasses.replace(results, done=min(results.done, len(runs)))
    return Stored(path, results, [run for run in runs if run.case.label in labels])
