"""The files that one trial leaves in the directory of runs.

Among them is a directory of its own, for what the script writes and would find again.  It is empty
when the trial begins.  The script gets it in the place of `{trial_dir}` among its arguments, and as
the variable `AMPATCH_TRIAL_DIR`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ampatch.sweep.trial import Trial

DIRECTORY_VARIABLE = "AMPATCH_TRIAL_DIR"


@dataclass(frozen=True)
class RunFiles:
    """Where the child writes, and where the finished run is kept."""

    run: Path
    record: Path  # written by the child, until the run has ended
    progress: Path
    log: Path
    directory: Path  # the script's own files
    ranks: Path  # a directory for torchrun, until the run has ended

    @classmethod
    def of(cls, directory: Path, trial: Trial) -> RunFiles:
        endings = ("json", "record", "progress", "log", "dir", "ranks")
        return cls(*(directory / f"{trial.file_stem}.{ending}" for ending in endings))

    def remove(self) -> None:
        """Delete what an earlier run of this trial left."""
        self.run.unlink(missing_ok=True)
        self.log.unlink(missing_ok=True)
        remove_directory(self.directory)
        self.remove_unfinished()

    def remove_unfinished(self) -> None:
        """Delete what is there while the trial runs."""
        self.record.unlink(missing_ok=True)
        self.progress.unlink(missing_ok=True)
        remove_directory(self.ranks)

    @contextmanager
    def own_directory(self) -> Iterator[None]:
        """The script's directory; removed at the end of the block if nothing was written."""
        self.directory.mkdir(parents=True)
        try:
            yield
        finally:
            if self.directory.is_dir() and not any(self.directory.iterdir()):
                self.directory.rmdir()


def remove_directory(path: Path) -> None:
    """Delete the directory and what is in it, if it is there."""
    if path.exists():
        shutil.rmtree(path)
