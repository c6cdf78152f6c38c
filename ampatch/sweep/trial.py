"""What a sweep runs: a `Case` is a row of the table, a `Trial` one process of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """What a row of the table stands for: an opt level, its half dtype, and what is special.

    `engine` is "ampatch", or "autocast" for the autocast baseline (torch.autocast and
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
class Trial:
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

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Trial:
        return cls(**{**data, "case": Case.from_json(data["case"])})
