"""What is tuned: a script and its opt level, with the options that its sweeps share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampatch.sweep import Sweep
from ampatch.sweep.execution.progress import Progress
from ampatch.sweep.trial import Case


@dataclass(frozen=True)
class Task:
    """A script at an opt level; `options` are those of `Sweep` that the user gave."""

    script: str
    arguments: Sequence[str]
    level: Case
    options: Mapping[str, Any]
    directory: Path
    progress: Callable[[], Progress | None]
    say: Callable[[str], None]

    @property
    def dtype(self) -> str:
        """The half type of the level."""
        return self.level.dtype or ""

    def sweep(
        self, rows: Sequence[Case], out: Path, options: Iterable[str], **others: Any
    ) -> Sweep:
        """A sweep of the script with the user's `options` of these names, and with `others`."""
        kept = {name: self.options[name] for name in options if name in self.options}
        return Sweep(self.script, self.arguments, rows=rows, out=out, **kept, **others)
