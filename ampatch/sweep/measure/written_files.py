"""The files that a trial wrote where the next trial finds them: in the working directory.

Only what this process writes counts: other programs may write into the directory as well.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import wrapt

MOST_NAMES = 20
_BESIDE_PYTHON = (("torch", "save"), ("safetensors.torch", "save_file"))
"""Functions that write files from C++ or Rust, of which Python's audit events say nothing."""


class WrittenFiles:
    """Names the files below `folders` that this process has written since it was made.

    Not those in hidden folders, in `__pycache__` or in `left_out`, the sweep's own directories.
    """

    def __init__(self, folders: Iterable[Path], left_out: Iterable[Path]) -> None:
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]
        self._left_out = [Path(os.path.realpath(folder)) for folder in left_out]
        self._written: set[str] = set()
        sys.addaudithook(self._hear)
        for module, name in _BESIDE_PYTHON:
            wrapt.register_post_import_hook(functools.partial(self._watch, name), module)

    def names(self) -> list[str]:
        """Their paths, seen from the folder; at most `MOST_NAMES`."""
        files = (Path(path) for path in self._written if os.path.isfile(path))
        found = {name for path in files if (name := self._seen_from_a_folder(path))}
        return sorted(found)[:MOST_NAMES]

    def _hear(self, event: str, given: tuple[Any, ...]) -> None:
        """Every audit event of the process comes here."""
        if event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR):
            self._note(given[0])
        elif event == "os.rename":
            self._note(given[1])

    def _note(self, path: Any) -> None:
        if isinstance(path, (str, bytes, os.PathLike)):  # not the number of an open file
            self._written.add(os.path.realpath(os.fsdecode(path)))

    def _watch(self, name: str, module: Any) -> None:
        write: Callable[..., Any] = getattr(module, name)

        @functools.wraps(write)
        def noted(*args: Any, **named: Any) -> Any:
            result = write(*args, **named)
            for given in (*args, *named.values()):
                self._note(given)
            return result

        setattr(module, name, noted)

    def _seen_from_a_folder(self, path: Path) -> str:
        """The path relative to a folder of ours, "" for what does not count."""
        if any(path.is_relative_to(folder) for folder in self._left_out):
            return ""
        for folder in self._folders:
            if path.is_relative_to(folder):
                parts = path.relative_to(folder).parts
                is_hidden = any(
                    part.startswith(".") or part == "__pycache__" for part in parts[:-1]
                )
                return "" if is_hidden else os.path.join(*parts)
        return ""
