"""The files that a trial wrote where the next trial finds them: in the working directory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

MOST_ENTRIES = 20_000  # that are looked at: a data set may lie there
MOST_NAMES = 20


class WrittenFiles:
    """Names the files in `folders` that were changed since it was made.

    Not those in hidden folders, in `__pycache__` or in `left_out`, the sweep's own directories.
    """

    def __init__(self, folders: Iterable[Path], left_out: Iterable[Path]) -> None:
        self._folders = list(dict.fromkeys(map(os.path.realpath, folders)))
        self._left_out = set(map(os.path.realpath, left_out))
        self._since = time.time()

    def names(self) -> list[str]:
        """Their paths, seen from the folder; at most `MOST_NAMES`."""
        found = {
            os.path.relpath(entry.path, folder): None
            for folder in self._folders
            for entry in self._entries(folder)
            if self._is_changed(entry)
        }
        return sorted(found)[:MOST_NAMES]

    def _entries(self, top: str) -> Iterator[os.DirEntry[str]]:
        """What is in a folder and in those below it, the nearest first."""
        waiting, left = [top], MOST_ENTRIES
        while waiting and left > 0:
            folder = waiting.pop(0)
            try:
                with os.scandir(folder) as scanned:
                    entries = list(scanned)
            except OSError:  # it went meanwhile, or cannot be read
                continue
            left -= len(entries)
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and self._is_searched(entry):
                    waiting.append(entry.path)
            yield from entries

    def _is_changed(self, entry: os.DirEntry[str]) -> bool:
        if not entry.is_file(follow_symlinks=False):
            return False
        try:
            return entry.stat(follow_symlinks=False).st_mtime >= self._since
        except FileNotFoundError:  # it went meanwhile
            return False

    def _is_searched(self, entry: os.DirEntry[str]) -> bool:
        hidden = entry.name.startswith(".") or entry.name == "__pycache__"
        return not hidden and os.path.realpath(entry.path) not in self._left_out
