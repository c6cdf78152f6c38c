"""Files of the user's folder: which of them a trial has written, and copies in which trials run."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

MOST = 50_000  # files are looked at
LARGE = 2**30  # bytes, from which an entry of the folder is linked and not copied
_OURS = ("ampatch-sweep", "ampatch-tune", "__pycache__")


def listed(folders: Sequence[Path], without: Path) -> dict[str, int]:
    """Times of change by file, as seen from here; hidden folders and `without` are left out."""
    own = {(stream.st_dev, stream.st_ino) for stream in map(os.fstat, _open_streams())}
    times = {}
    for path in _files(folders, without):
        with contextlib.suppress(OSError):  # it is gone again
            state = os.stat(path)
            if (state.st_dev, state.st_ino) not in own:
                times[os.path.relpath(path)] = state.st_mtime_ns
        if len(times) == MOST:
            break
    return times


def changed(before: dict[str, int], now: dict[str, int]) -> list[str]:
    """What is new or has another time; of a folder in the folder only its name."""
    names = sorted(name for name in now if before.get(name) != now[name])
    tops = (name.partition(os.sep)[::2] for name in names if not name.startswith(os.pardir))
    beside = (name for name in names if name.startswith(os.pardir))
    return list(dict.fromkeys([*(f"{top}/..." if rest else top for top, rest in tops), *beside]))


def large(folder: Path, without: Path) -> list[str]:
    """The entries of a folder that are linked in a copy: what is large, hidden, or a link."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.is_symlink()
        or (path.is_dir() and path.name.startswith("."))
        or _size(path, without) >= LARGE
    )


@contextlib.contextmanager
def copied(folder: Path, copy: Path, without: Path) -> Iterator[None]:
    """A copy of a folder during the block; what was written there stays after it."""
    links = large(folder, without)
    for name in links:
        copy.mkdir(parents=True, exist_ok=True)
        (copy / name).symlink_to((folder / name).resolve())

    def left_out(place: str, names: list[str]) -> list[str]:
        ours = [name for name in names if name in _OURS or Path(place, name) == without]
        return [*ours, *(links if Path(place) == folder else ())]

    shutil.copytree(folder, copy, symlinks=True, ignore=left_out, dirs_exist_ok=True)
    before = {path: path.lstat().st_mtime_ns for path in copy.rglob("*") if not path.is_dir()}
    try:
        yield
    finally:
        for place, _, _ in os.walk(copy, topdown=False):
            for path in Path(place).iterdir():
                if path.is_symlink() or before.get(path) == path.lstat().st_mtime_ns:
                    path.unlink()
            with contextlib.suppress(OSError):  # something was written there
                Path(place).rmdir()


def _files(folders: Sequence[Path], without: Path) -> Iterator[str]:
    for folder in folders:
        for place, inside, names in os.walk(folder):
            inside[:] = [
                name
                for name in inside
                if not name.startswith(".") and name not in _OURS and Path(place, name) != without
            ]
            yield from (os.path.join(place, name) for name in names)


def _size(path: Path, without: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(os.lstat(file).st_size for file in _files([path], without))


def _open_streams() -> Iterator[int]:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, or not of a file
            yield stream.fileno()
