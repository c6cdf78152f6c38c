"""The findings of the probe: the errors of each module in half, their file and their ranking."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ampatch.sweep.json_files import from_json, read_json, write_json
from ampatch.tune.module_call import CallErrors


@dataclass(frozen=True)
class Sensitivity:
    """The samples of a module, or in `trouble` the reason why it has none.

    `is_refused`: the module runs again in FP32, but not in half.
    """

    path: str
    kind: str  # the class of the module
    samples: tuple[CallErrors, ...] = ()
    trouble: str = ""
    is_refused: bool = False

    @property
    def error(self) -> float:
        """The largest relative error of outputs or gradients: inf if refused, 0 if not known."""
        if self.is_refused:
            return math.inf
        return max((sample.error for sample in self.samples), default=0.0)

    @property
    def overflow(self) -> float:
        return max((sample.overflow for sample in self.samples), default=0.0)

    @property
    def vanish(self) -> float:
        return max((sample.vanish for sample in self.samples), default=0.0)


@dataclass
class Findings:
    """The measured modules, the `paths` of all modules, and the eps values of the optimizers."""

    steps: int = 0
    modules: list[Sensitivity] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    eps: list[float] = field(default_factory=list)

    def write(self, path: Path) -> None:
        write_json(path, self)

    @classmethod
    def read(cls, path: Path) -> Findings | None:
        """The findings in a file of `write`, or None if the file does not exist."""
        data = read_json(path)
        return None if data is None else from_json(cls, data)


def ranked(modules: Iterable[Sensitivity]) -> list[Sensitivity]:
    """Modules, the most sensitive first; among equals a submodule before its parent.

    Modules that cannot run in half come first, modules without a measurement last.
    """

    def key(module: Sensitivity) -> tuple:
        is_known = module.is_refused or bool(module.samples)
        depth = module.path.count(".")
        ranks = -module.error, not module.is_refused, -module.overflow, -depth
        return not is_known, *ranks, module.path

    return sorted(modules, key=key)
