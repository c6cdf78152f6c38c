"""A directory for each trial, for the files that the script writes and would find again.

It is empty when the trial begins.  The script gets it in the place of `{trial_dir}` among its
arguments, and as the variable `AMPATCH_TRIAL_DIR`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "AMPATCH_TRIAL_DIR"


@contextmanager
def empty_directory(path: Path) -> Iterator[Path]:
    """The directory `path`, new; removed at the end of the block if nothing was written."""
    remove(path)
    path.mkdir(parents=True)
    try:
        yield path.resolve()  # the script may change the directory
    finally:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def remove(path: Path) -> None:
    """Delete the directory and what is in it, if it is there."""
    if path.exists():
        shutil.rmtree(path)
