"""What one trial measured, and its JSON file: `DIR/runs/LABEL.seedS.repeatR.json`.

The child writes `Measured`: raw series without averages, so that later versions can compute other
figures.  The parent writes `Run`: the trial, how it ended, and what was measured.
`report/rows.py` computes the figures of the table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampatch.log import logger
from ampatch.sweep.json_files import from_json, read_json, to_json
from ampatch.sweep.kinds import UNKNOWN_KIND, Kind
from ampatch.sweep.trial import Case, Trial

FORMAT = 4  # increased whenever readers of the files have to change
OTHER_FORMAT = (
    f"This version reads format {FORMAT}. Read older results with the version of ampatch that "
    "wrote them (their summary.json names it), or run the sweep anew in another folder (--out)."
)


@dataclass
class Series:
    """Values in the order in which they were recorded.

    `steps[i]` is the number of optimizer steps before `values[i]`; for numbers in the output it is
    `i`.  `seconds[i]`, if recorded, is the time on the host since the script started.
    """

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass
class Measured:
    """What the child measured in its own process."""

    opt_level: str | None = None  # the level that ran; None if initialize was never called
    properties: dict[str, str] = field(default_factory=dict)
    skipped: list[bool] = field(default_factory=list)  # whether each step was skipped, in order
    step_seconds: list[float | None] = field(default_factory=list)  # wall time since the last step
    cpu_seconds: list[float | None] = field(default_factory=list)  # CPU time since the last step
    losses: dict[str, Series] = field(default_factory=dict)  # by loss_id, with seconds
    metrics: dict[str, Series] = field(default_factory=dict)  # by the names in the script
    loss_scales: dict[str, Series] = field(default_factory=dict)  # by loss_id, only changes
    loss_scale: float | None = None  # the scale of loss 0 at the end
    device: str | None = None  # "cpu", or the name of the GPU
    memory_bytes: int | None = None
    memory_kind: str = "resident"  # or "device"
    stopped_at: int | None = None  # the number of --steps, if --steps ended the script
    machine: dict[str, Any] = field(default_factory=dict)  # load, threads, native part
    error: str = ""  # the exception that ended the script
    own_seed: str = ""  # the script's first call that set a seed other than the trial's
    autocast_off: list[str] = field(default_factory=list)  # lines whose autocast regions were off
    casts_nothing: bool = False  # True if O1 cast nothing, as the script trains no nn.Module
    kind: Kind = UNKNOWN_KIND  # kind of the script, if this run had to recognize it


@dataclass
class Run:
    """A trial after its process ended."""

    trial: Trial
    exit_code: int
    seconds: float  # duration of the whole process
    measured: Measured | None  # None if the process ended without writing it
    ended_by: str = ""  # why the parent ended the process, if it did
    timeout: float | None = None  # seconds that were allowed
    alone: bool = True  # whether no other trial ran on its devices, so that its times count
    imports: float = 0.0  # seconds of imports in a cold start, which warm starts do not take
    host: str = ""  # name of the machine
    devices: tuple[str, ...] = ()  # devices of this run, such as "cuda:1"
    wrote: list[str] = field(default_factory=list)  # files in the user's folder, by O0's first run
    linked: list[str] = field(default_factory=list)  # links in the folder's copy, of O0's first run

    @property
    def case(self) -> Case:
        """The row of the run."""
        return self.trial.case

    @property
    def steps(self) -> int:
        """The number of optimizer steps that were taken or skipped."""
        return len(self.measured.skipped) if self.measured else 0

    def to_json(self) -> dict[str, Any]:
        fields = dict(vars(self))
        return to_json({"format": FORMAT, "planned": fields.pop("trial"), **fields})

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Run:
        """The run.  Raises `ValueError` for a run in another version's format."""
        if data.get("format") != FORMAT:
            raise ValueError(f"a run in format {data.get('format')}. {OTHER_FORMAT}")
        fields = {name: value for name, value in data.items() if name not in ("format", "planned")}
        return from_json(cls, {"trial": data["planned"], **fields})


def read_run(path: Path) -> Run | None:
    """The run in a file; None if there is none or, with a warning, if it is damaged.

    Raises `ValueError` for a run in another version's format.
    """
    try:
        data = read_json(path)
    except ValueError:  # no JSON or no text, because a disk was full or the power failed
        data = {}
    if data is None:
        return None
    try:
        return Run.from_json(data) if "format" in data else _damaged(path)
    except (AttributeError, KeyError, TypeError):  # JSON, but not of a run
        return _damaged(path)


def _damaged(path: Path) -> None:
    logger.warning(
        "%s: is cut off or damaged, so its run counts as not done. ampatch sweep --resume runs it "
        "again.",
        path,
    )
