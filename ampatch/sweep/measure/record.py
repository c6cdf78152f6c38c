"""What one trial measured, and its JSON file: `DIR/runs/LABEL.seedS.repeatR.json`.

The child writes `Measured`: raw series without averages, so that later versions can compute other
figures.  `Run` is the parent's record: the trial, how it ended, and what was measured.
`report/summary.py` computes the figures of the table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampatch.log import logger
from ampatch.sweep.json_files import plain, read_json, restored
from ampatch.sweep.kinds import UNKNOWN, Kind
from ampatch.sweep.trial import Case, Trial

FORMAT = 4  # increased when a reader of the files has to change
OTHER_FORMAT = (
    f"This version reads format {FORMAT}. Read older results with the version of ampatch that "
    "wrote them (their summary.json names it), or run the sweep anew in another folder (--out)."
)


@dataclass
class Series:
    """Values in the order they came.

    `steps[i]` is how many optimizer steps had been taken before `values[i]`; for numbers in the
    output it is `i`.  `seconds[i]`, if recorded, is the time on the host since the script started.
    """

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass
class Measured:
    """What the child measured in its own process."""

    opt_level: str | None = None  # the level that ran; None: initialize was never called
    properties: dict[str, str] = field(default_factory=dict)
    skipped: list[bool] = field(default_factory=list)  # every managed step, in order
    step_seconds: list[float | None] = field(default_factory=list)  # since the step before
    cpu_seconds: list[float | None] = field(default_factory=list)  # the same, as CPU time
    losses: dict[str, Series] = field(default_factory=dict)  # by loss_id; with seconds
    metrics: dict[str, Series] = field(default_factory=dict)  # by the script's names
    loss_scales: dict[str, Series] = field(default_factory=dict)  # by loss_id: where it changes
    loss_scale: float | None = None  # loss 0's, at the end
    device: str | None = None  # "cpu", or the name of the GPU
    memory_bytes: int | None = None
    memory_kind: str = "resident"  # or "device"
    stopped_at: int | None = None  # the number of --steps, if that ended the script
    machine: dict[str, Any] = field(default_factory=dict)  # load, threads, native part
    error: str = ""  # the exception that ended the script
    own_seed: str = ""  # the script's first call that set another seed than the trial's
    autocast_off: list[str] = field(default_factory=list)  # lines of regions that were off
    casts_nothing: bool = False  # O1 of a plain script, which trains tensors of no module
    kind: Kind = UNKNOWN  # the script's, where this run was to recognize it


@dataclass
class Run:
    """A trial after its process ended."""

    trial: Trial
    exit_code: int
    seconds: float  # the whole process
    measured: Measured | None  # None: the process ended without a record
    ended_by: str = ""  # why the parent ended it, if it did
    timeout: float | None = None  # seconds, in this run
    alone: bool = True  # nothing else of the sweep ran on its devices: it counts for speed
    imports: float = 0.0  # seconds of imports in a cold start, which warm ones do not take
    host: str = ""  # the machine's name
    devices: tuple[str, ...] = ()  # the run's own, such as "cuda:1"
    wrote: list[str] = field(default_factory=list)  # first run: files written in the user's folder
    linked: list[str] = field(default_factory=list)  # first run: links in its copy of the folder

    @property
    def case(self) -> Case:
        """The row of the run."""
        return self.trial.case

    @property
    def steps(self) -> int:
        """How many optimizer steps were taken or skipped."""
        return len(self.measured.skipped) if self.measured else 0

    def to_json(self) -> dict[str, Any]:
        fields = dict(vars(self))
        return plain({"format": FORMAT, "planned": fields.pop("trial"), **fields})

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Run:
        """The run; `ValueError` for one in another version's format."""
        if data.get("format") != FORMAT:
            raise ValueError(f"a run in format {data.get('format')}. {OTHER_FORMAT}")
        fields = {name: value for name, value in data.items() if name not in ("format", "planned")}
        return restored(cls, {"trial": data["planned"], **fields})


def read_run(path: Path) -> Run | None:
    """The run in a file; None if there is none or, with a warning, if it is damaged.

    Raises `ValueError` for a run in another version's format.
    """
    try:
        data = read_json(path)
    except ValueError:  # no JSON, or no text: a disk was full, or the machine lost its power
        data = {}
    if data is None:
        return None
    try:
        return Run.from_json(data) if "format" in data else _damaged(path)
    except (AttributeError, KeyError, TypeError):  # JSON, and not of a run
        return _damaged(path)


def _damaged(path: Path) -> None:
    logger.warning(
        "%s: is cut off or damaged, so its run counts as not done. ampatch sweep --resume runs it "
        "again.",
        path,
    )
