"""What one run measured, and how it is kept as JSON.

`Measured` is written by the child: raw series, nothing averaged, so that a
later question can be asked of an old sweep.  `Run` is the parent's view: which
case it was, how it ended, and what was measured until then.  The figures that
a table shows are computed from these in `summary.py`.

JSON has no NaN and no infinity; they are written as the strings "nan", "inf"
and "-inf".
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1  # rises when a reader of the files would have to change


@dataclass(frozen=True)
class Case:
    """One thing to run: an opt level and its half dtype (none for O0)."""

    opt_level: str
    dtype: str | None = None

    @property
    def label(self) -> str:
        """The name for files and progress lines, such as `O1-float16`."""
        return "-".join(part for part in (self.opt_level, self.dtype) if part)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that make `ampatch.initialize` run this case."""
        variables = {"AMPATCH_OPT_LEVEL": self.opt_level, "AMPATCH_DTYPE": self.dtype}
        return {name: value for name, value in variables.items() if value}


@dataclass
class Series:
    """Values, and how many optimizer steps had been taken before each."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Series:
        return cls(data["steps"], [float(value) for value in data["values"]])


@dataclass
class Measured:
    """What the child saw of its own run."""

    opt_level: str | None = None  # as it really ran; None: initialize was never called
    properties: dict[str, str] = field(default_factory=dict)
    skipped: list[bool] = field(default_factory=list)  # every managed step, in order
    step_seconds: list[float | None] = field(default_factory=list)  # since the step before
    losses: dict[str, Series] = field(default_factory=dict)  # by loss_id
    metrics: dict[str, Series] = field(default_factory=dict)  # by the script's names
    loss_scale: float | None = None
    device: str | None = None  # "cpu", or the name of the GPU
    memory_bytes: int | None = None
    memory_kind: str = "resident"  # or "device"
    error: str = ""  # of the exception that ended the script

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measured:
        measured = cls(**data)
        measured.losses = _series(measured.losses)
        measured.metrics = _series(measured.metrics)
        if measured.loss_scale is not None:
            measured.loss_scale = float(measured.loss_scale)
        return measured


@dataclass
class Run:
    """One case after its process ended."""

    case: Case
    exit_code: int
    seconds: float
    measured: Measured | None  # None: the process ended without a record
    ended_by: str = ""  # why the parent ended it, if it did

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Run:
        measured = data["measured"]
        return cls(
            Case(**data["case"]),
            data["exit_code"],
            data["seconds"],
            None if measured is None else Measured.from_json(measured),
            data["ended_by"],
        )


def write_json(path: Path, data: Any) -> None:
    """Write `data` so that a reader finds the whole file or none."""
    text = json.dumps(_plain(data), indent=1, allow_nan=False)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def read_json(path: Path) -> Any:
    """What `write_json` wrote; None when there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _series(data: dict[str, Any]) -> dict[str, Series]:
    return {name: Series.from_json(series) for name, series in data.items()}


def _plain(value: Any) -> Any:
    """`value` with dataclasses as dicts and non-finite floats as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if dataclasses.is_dataclass(value):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
