"""What one run measured, and how it is kept as JSON: `DIR/runs/LABEL.seedS.repeatR.json`.

`Measured` is written by the child: raw series, nothing averaged, so that a
later question can be asked of an old sweep.  `Run` is the parent's view: which
case it was, how it ended, and what was measured until then.  The figures that
a table shows are computed from these in `summary.py`; `results.py` says what
lies where in the directory.

JSON has no NaN and no infinity; they are written as the strings "nan", "inf"
and "-inf", and `from_json` makes numbers of them again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 2  # rises when a reader of the files would have to change


@dataclass(frozen=True)
class Case:
    """What a row of the table stands for: an opt level, its half dtype, and what is special.

    `engine` is "ampatch", or "autocast" for the peer's row (torch.autocast and
    GradScaler; `opt_level` is then "autocast").  `settings` are keywords of
    `initialize`, as (name, value) pairs.
    """

    opt_level: str
    dtype: str | None = None  # None for FP32
    engine: str = "ampatch"
    tf32: bool = False
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """Unique in a sweep: `O0+tf32`, `O1-float16`, `O2-float16-keep_batchnorm_fp32=False`."""
        parts = [self.opt_level + ("+tf32" if self.tf32 else ""), self.dtype]
        parts += [f"{name}={value}" for name, value in self.settings]
        return "-".join(part for part in parts if part)

    @property
    def level_name(self) -> str:
        """The label without the dtype, for a table that has a column for it."""
        return dataclasses.replace(self, dtype=None).label

    @property
    def environment(self) -> dict[str, str]:
        """The variables that make `ampatch.initialize` run this case."""
        if self.engine == "autocast":
            return {"AMPATCH_DTYPE": self.dtype or "float16"}
        variables = {"AMPATCH_OPT_LEVEL": self.opt_level}
        if self.dtype:
            variables["AMPATCH_DTYPE"] = self.dtype
        if self.settings:
            variables["AMPATCH_SETTINGS"] = json.dumps(dict(self.settings))
        return variables

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Case:
        pairs = tuple((name, value) for name, value in data["settings"])
        return cls(**{**data, "settings": pairs})


@dataclass(frozen=True)
class Planned:
    """One process to start: a case, its seed, and which repeat of the same it is (from 0)."""

    case: Case
    seed: int = 0
    repeat: int = 0

    @property
    def label(self) -> str:
        """`O1-float16 seed 2`, and the repeat from the second on."""
        again = f" repeat {self.repeat}" if self.repeat else ""
        return f"{self.case.label} seed {self.seed}{again}"

    @property
    def file_stem(self) -> str:
        """`O1-float16.seed2.repeat0`; characters that a file name should not have are replaced."""
        label = self.case.label
        plain = re.sub(r"[^\w+.=,-]", "_", label)[:80]
        if plain != label:
            plain += "-" + hashlib.sha256(label.encode()).hexdigest()[:8]
        return f"{plain}.seed{self.seed}.repeat{self.repeat}"


@dataclass
class Series:
    """Values in the order they came.

    `steps[i]` is how many optimizer steps had been taken before `values[i]`;
    `seconds[i]`, where there is one, the host's clock since the script started.
    """

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Series:
        return cls(data["steps"], [float(value) for value in data["values"]], data["seconds"])


@dataclass
class Measured:
    """What the child saw of its own run."""

    opt_level: str | None = None  # as it really ran; None: initialize was never called
    properties: dict[str, str] = field(default_factory=dict)
    skipped: list[bool] = field(default_factory=list)  # every managed step, in order
    step_seconds: list[float | None] = field(default_factory=list)  # since the step before
    losses: dict[str, Series] = field(default_factory=dict)  # by loss_id; with seconds
    metrics: dict[str, Series] = field(default_factory=dict)  # by the script's names
    loss_scales: dict[str, Series] = field(default_factory=dict)  # by loss_id: where it changes
    loss_scale: float | None = None  # of loss 0, at the end
    samples: Series = field(default_factory=Series)  # as the script reports them
    output_marks: list[tuple[int, int]] = field(default_factory=list)  # (step, bytes of output)
    device: str | None = None  # "cpu", or the name of the GPU
    memory_bytes: int | None = None
    memory_kind: str = "resident"  # or "device"
    matmul_precision: str = "highest"  # of FP32; "high" is TF32
    stopped_at: int | None = None  # the sweep's --steps, if that ended the script
    error: str = ""  # of the exception that ended the script

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measured:
        measured = cls(**data)
        for name in ("losses", "metrics", "loss_scales"):
            table = getattr(measured, name)
            setattr(measured, name, {key: Series.from_json(one) for key, one in table.items()})
        measured.samples = Series.from_json(data["samples"])
        measured.output_marks = [(step, size) for step, size in data["output_marks"]]
        if measured.loss_scale is not None:
            measured.loss_scale = float(measured.loss_scale)
        return measured


@dataclass
class Run:
    """One planned run after its process ended."""

    planned: Planned
    exit_code: int
    seconds: float  # of the whole process
    measured: Measured | None  # None: the process ended without a record
    ended_by: str = ""  # why the parent ended it, if it did
    timeout: float | None = None  # seconds, as it was when the run was made

    @property
    def case(self) -> Case:
        return self.planned.case

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Run:
        planned, measured = data["planned"], data["measured"]
        return cls(
            Planned(**{**planned, "case": Case.from_json(planned["case"])}),
            data["exit_code"],
            data["seconds"],
            None if measured is None else Measured.from_json(measured),
            data["ended_by"],
            data["timeout"],
        )


def write_json(path: Path, data: Any) -> None:
    """Write `data` so that a reader finds the whole file or none."""
    text = json.dumps(_plain(data), indent=1, allow_nan=False)
    write_whole(path, text + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write `text` so that a reader finds the whole file or none."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def read_json(path: Path) -> Any:
    """What `write_json` wrote; None when there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


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
