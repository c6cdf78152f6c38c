"""The files that one trial leaves in the directory of runs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ampatch.sweep.trial import Trial


@dataclass(frozen=True)
class RunFiles:
    """Where the child writes, and where the finished run is kept."""

    run: Path
    record: Path  # written by the child, until the run has ended
    progress: Path
    log: Path
    directory: Path  # the script's own files: see `trial_directory.py`
    ranks: Path  # a directory for torchrun, until the run has ended

    @classmethod
    def of(cls, directory: Path, trial: Trial) -> RunFiles:
        endings = ("json", "record", "progress", "log", "dir", "ranks")
        return cls(*(directory / f"{trial.file_stem}.{ending}" for ending in endings))

    def remove(self) -> None:
        """Delete what an earlier run of this trial left."""
        for path in (self.run, self.record, self.progress, self.log):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.ranks, ignore_errors=True)
