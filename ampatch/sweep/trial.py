"""What a sweep runs: a `Case` is a row of the table, a `Trial` one process of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

AS_IT_IS = "script"  # the engine of a case that runs the script unchanged


@dataclass(frozen=True)
class Case:
    """A row of the table: an opt level, a half dtype, and settings.

    `engine` is what casts (the option `engine` of a sweep is what starts trials): "ampatch",
    "autocast" for torch.autocast and GradScaler as the baseline, or `AS_IT_IS` for a script with
    its own autocast code.  For the last two `opt_level` is "autocast"; for `AS_IT_IS` `dtype` is
    that of the script's regions.  `settings` are (name, value) pairs: keywords of `initialize`, and
    `eps`, the smallest eps that optimizers may have.
    """

    opt_level: str
    dtype: str | None = None  # None for FP32
    engine: str = "ampatch"
    tf32: bool = False
    settings: tuple[tuple[str, Any], ...] = ()

    def __hash__(self) -> int:
        return hash(self.label)  # settings such as overrides are dictionaries

    @property
    def label(self) -> str:
        """Unique in a sweep: `O0+tf32`, `O1-float16`, `O2-float16-loss_scale=128`."""
        parts = [self.opt_level + ("+tf32" if self.tf32 else ""), self.dtype]
        parts += [f"{name}={value}" for name, value in self.settings]
        return "-".join(part for part in parts if part)

    @property
    def level_name(self) -> str:
        """The label without the dtype: opt level, "+tf32" and settings."""
        return dataclasses.replace(self, dtype=None).label

    @property
    def environment(self) -> dict[str, str]:
        """The variables that make `ampatch.initialize` run this case."""
        if self.engine == AS_IT_IS:
            return {}
        if self.engine == "autocast":
            return {"AMPATCH_DTYPE": self.dtype or "float16"}
        variables = {"AMPATCH_OPT_LEVEL": self.opt_level}
        if self.dtype:
            variables["AMPATCH_DTYPE"] = self.dtype
        settings = {name: value for name, value in self.settings if name != "eps"}
        if settings:
            variables["AMPATCH_SETTINGS"] = json.dumps(settings)
        return variables


BASE = Case("O0")  # what the other rows are compared with


@dataclass(frozen=True)
class Trial:
    """One process of a sweep: a case, its seed and, for a short run, its repeat (from 1).

    A full run trains as the script does.  A `short` run ends after a few seconds of training and
    measures speed only.  `again` marks the second, short O0 run of a round: its difference from
    the first is the noise of the machine.
    """

    case: Case
    seed: int = 0
    repeat: int = 0
    short: bool = False
    again: bool = False

    @property
    def round(self) -> tuple[int, int]:
        """Equal for the trials of one round."""
        return self.repeat, self.seed

    @property
    def label(self) -> str:
        """`O1-float16 seed 2`; a short run has its repeat and `(timing)` too."""
        parts = [f"{self.case.label} seed {self.seed}"]
        parts += [f"repeat {self.repeat}"] if self.repeat else []
        parts += ["again"] if self.again else []
        return " ".join([*parts, "(timing)"] if self.short else parts)

    @property
    def file_stem(self) -> str:
        """`O1-float16.seed2.repeat0`, `O1-float16.seed0.repeat1.short`, `O0.seed0.repeat1.again`.

        Characters that a file name should not have are replaced.
        """
        label = self.case.label
        file_label = re.sub(r"[^\w+.=,-]", "_", label)[:80]
        if file_label != label:
            file_label += "-" + hashlib.sha256(label.encode()).hexdigest()[:8]
        ending = ".again" if self.again else ".short" if self.short else ""
        return f"{file_label}.seed{self.seed}.repeat{self.repeat}{ending}"
