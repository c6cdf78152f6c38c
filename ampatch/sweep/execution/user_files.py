"""The user's folder: which files a trial has written there, and copies in which trials run."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_FILES = 50_000  # files whose modification times are compared
MIN_LINKED_BYTES = 2**30  # bytes; an entry of the folder of this size is linked, not copied
_IGNORED = ("ampatch-sweep", "ampatch-tune", "__pycache__")


def change_times(folders: Sequence[Path], excluded: Path) -> dict[str, int]:
    """The modification times of files in nanoseconds, except in hidden folders and `excluded`."""
    streams = {(stream.st_dev, stream.st_ino) for stream in map(os.fstat, _open_streams())}
    times = {}
    for path in _files(folders, excluded):
        with contextlib.suppress(OSError):  # the file was deleted meanwhile
            status = os.stat(path)
            if (status.st_dev, status.st_ino) not in streams:
                times[os.path.relpath(path)] = status.st_mtime_ns
        if len(times) == MAX_FILES:
            break
    return times


def changed_names(before: dict[str, int], now: dict[str, int]) -> list[str]:
    """The files that are new or have another time; `SUBFOLDER/...` for files in a subfolder."""
    names = sorted(name for name in now if before.get(name) != now[name])
    inside = (name.partition(os.sep)[::2] for name in names if not name.startswith(os.pardir))
    outside = (name for name in names if name.startswith(os.pardir))
    return list(dict.fromkeys([*(f"{top}/..." if rest else top for top, rest in inside), *outside]))


def linked_entries(folder: Path, excluded: Path) -> list[str]:
    """The entries of a folder that a copy links to: large entries, hidden folders, and links."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.is_symlink()
        or (path.is_dir() and path.name.startswith("."))
        or _size(path, excluded) >= MIN_LINKED_BYTES
    )


@contextlib.contextmanager
def copy_of(folder: Path, copy: Path, excluded: Path) -> Iterator[None]:
    """Copy a folder for the block.  On exit only files that were written in the copy stay."""
    links = linked_entries(folder, excluded)
    for name in links:
        copy.mkdir(parents=True, exist_ok=True)
        (copy / name).symlink_to((folder / name).resolve())

    def ignored(parent: str, names: list[str]) -> list[str]:
        never_copied = [name for name in names if _is_ignored(parent, name, excluded)]
        return [*never_copied, *(links if Path(parent) == folder else ())]

    shutil.copytree(folder, copy, symlinks=True, ignore=ignored, dirs_exist_ok=True)
    before = {path: path.lstat().st_mtime_ns for path in copy.rglob("*") if not path.is_dir()}
    try:
        yield
    finally:
        for subfolder, _, _ in os.walk(copy, topdown=False):
            for path in Path(subfolder).iterdir():
                if path.is_symlink() or before.get(path) == path.lstat().st_mtime_ns:
                    path.unlink()
            with contextlib.suppress(OSError):  # not empty: something was written there
                Path(subfolder).rmdir()


def _files(folders: Sequence[Path], excluded: Path) -> Iterator[str]:
    for folder in folders:
        for parent, subfolders, names in os.walk(folder):
            visible = (name for name in subfolders if not name.startswith("."))
            subfolders[:] = [name for name in visible if not _is_ignored(parent, name, excluded)]
            yield from (os.path.join(parent, name) for name in names)


def _is_ignored(parent: str, name: str, excluded: Path) -> bool:
    return name in _IGNORED or Path(parent, name) == excluded


def _size(path: Path, excluded: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(os.lstat(file).st_size for file in _files([path], excluded))


def _open_streams() -> Iterator[int]:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no stream, or no file
            yield stream.fileno()
