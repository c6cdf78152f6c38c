"""The directory of a sweep, in which only one sweep runs at a time.

It is locked while a sweep runs.  It belongs to the sweep whose results, `summary.json`, are in it:
only that sweep continues in it (`resume`), and another replaces it only on request (`overwrite`).
Only files that the results name are ever deleted.  A folder with files but no results is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shlex
import shutil
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampatch.sweep.json_files import to_json
from ampatch.sweep.measure.run_record import Run, read_run
from ampatch.sweep.options import SweepOptions
from ampatch.sweep.report.numbers import setting_text
from ampatch.sweep.report.results import (
    EVENTS,
    PICTURE_FILES,
    REPORT,
    RUNS,
    SUMMARY,
    TABLES,
    Results,
    read_results,
)
from ampatch.sweep.trial import Trial

DIRECTORY_VARIABLE = "AMPATCH_TRIAL_DIR"  # holds the directory for files of the script
MAY_GROW = ("rounds", "seeds", "rows", "dtypes")  # settings of which a resumed sweep may have more
_LOCK = ".lock"


@dataclass(frozen=True)
class RunFiles:
    """The files and folders of one trial in the directory of runs.

    `directory` is for the files of the script and empty when the trial begins: `{trial_dir}` among
    the arguments and the variable `AMPATCH_TRIAL_DIR` name it.
    """

    run: Path
    measured: Path  # written by the child; deleted when the run has ended
    progress: Path
    log: Path  # what the script prints
    directory: Path
    ranks: Path  # a directory for torchrun; deleted when the run has ended
    imports: Path  # the imports of a cold run; deleted when the run has ended
    copy: Path  # with --in-copy: the current folder; after the run only what was written there

    @classmethod
    def of(cls, directory: Path, trial: Trial | str) -> RunFiles:
        """The files of a trial, or of its stem."""
        stem = trial if isinstance(trial, str) else trial.file_stem
        endings = ("json", "record", "progress", "log", "dir", "ranks", "imports", "copy")
        return cls(*(directory / f"{stem}.{ending}" for ending in endings))

    def remove(self) -> None:
        """Delete what an earlier run of this trial left."""
        for path in vars(self).values():
            _remove(path)

    def remove_temporary_files(self) -> None:
        """Delete the files that exist only while the trial runs."""
        for path in (self.measured, self.progress, self.imports, self.ranks):
            _remove(path)

    @contextlib.contextmanager
    def script_directory(self) -> Iterator[None]:
        """The script's directory; removed at the end of the block if nothing was written."""
        self.directory.mkdir(parents=True)
        try:
            yield
        finally:
            if self.directory.is_dir() and not any(self.directory.iterdir()):
                self.directory.rmdir()


def _remove(path: Path) -> None:
    """Delete the file, or the directory and what is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def choose_directory(out: str | Path | None, title: str, takes_existing: bool) -> Path:
    """`out`, or by default `ampatch-sweep/TITLE`, with a number if that is in use.

    With `takes_existing` the default is the last of these folders that has a sweep, if any has.
    """
    if out is not None:
        return Path(out)
    endings = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    last: Path | None = None
    for path in (Path("ampatch-sweep") / f"{title}{ending}" for ending in endings):
        if _is_free(path):
            break
        last = path if (path / SUMMARY).exists() else last
    return last if last and takes_existing else path


def results_in(path: Path, files: Sequence[str] = ()) -> Results | None:
    """The results of the sweep in a folder; None if the folder is empty or does not exist.

    Changes nothing.  Raises `ValueError` for a folder with other files and no results, and if one
    of `files`, which are to be written, exists and does not belong to the sweep.
    """
    results = read_results(path)
    if results is None and not _is_free(path):
        raise ValueError(
            f"{path}: has files, and no summary.json of a sweep. Nothing was changed. Choose a new "
            "or an empty folder with --out; --overwrite replaces only files of a sweep."
        )
    for name in set(files).difference(results.files if results else ()):
        if (path / name).exists():
            raise ValueError(
                f"{path / name}: was not written by the sweep in this folder. Nothing was changed. "
                "Move the file away, or choose another folder with --out."
            )
    return results


def delete_sweep_files(path: Path) -> None:
    """Delete the files of the sweep in a folder, except `summary.json`, and no other files."""
    results = read_results(path)
    if results is None:
        return
    for stem in results.trials:
        RunFiles.of(path / RUNS, stem).remove()
        _remove(path / EVENTS / stem)
    for name in (*TABLES, REPORT, *PICTURE_FILES, *results.files):
        _remove(path / name)


def _is_free(path: Path) -> bool:
    """Whether the folder does not exist, or is empty."""
    return not path.is_dir() or all(file.name == _LOCK for file in path.iterdir())


class Directory:
    """A directory that a sweep locks, from construction to `release`.

    Raises `OSError` if it cannot be written, `ValueError` if another sweep runs or has run in it.
    """

    def __init__(self, path: Path, settings: dict[str, Any], options: SweepOptions) -> None:
        self.path, self.runs = path, path / RUNS
        self.settings = to_json(settings)
        self._unlock = _lock_directory(self, path)
        try:
            with _with_remedy(path):
                existing = results_in(path, options.files)
                self.earlier = None if options.overwrite else existing
                if self.earlier is None:
                    delete_sweep_files(path)
                else:
                    self._check(self.earlier, options.resume)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Unlock the directory for other sweeps.  A second call changes nothing."""
        self._unlock()

    def add_settings(self, settings: dict[str, Any]) -> None:
        """Add settings that are known only now, or replace them."""
        self.settings.update(to_json(settings))

    def finished(self, trials: Sequence[Trial], timeout: float | None) -> Iterator[Run]:
        """The runs of the sweep that is resumed, except those that a longer timeout may finish."""
        for trial in trials if self.earlier else ():
            run = read_run(RunFiles.of(self.runs, trial).run)
            if run is None:
                continue
            is_longer = run.timeout is not None and (timeout is None or timeout > run.timeout)
            if not (run.ended_by and is_longer):
                yield dataclasses.replace(run, trial=trial)  # its own trial has lists for tuples

    def _check(self, earlier: Results, resume: bool) -> None:
        """Raise `ValueError` if the sweep cannot be resumed, or if `resume` is False."""
        if not resume:
            raise ValueError(
                f"{self.path}: holds a sweep of {earlier.script} from {earlier.started}, "
                f"{earlier.done} of {earlier.planned} runs. Continue it with --resume, replace it "
                "with --overwrite, or choose another directory with --out."
            )
        by_budget = ("seeds", "rounds") if earlier.plan.get("budget") else ()
        before = {name: n for name, n in earlier.settings.items() if name not in by_budget}
        now = {name: n for name, n in self.settings.items() if name not in by_budget}
        differences = _differences(before, now)
        if differences:
            raise ValueError(
                f"{self.path}: cannot be resumed, it is another sweep: {differences}. Give the "
                "same settings, replace it with --overwrite, or choose another directory with "
                "--out."
            )


def _lock_directory(holder: object, path: Path) -> weakref.finalize[..., Any]:
    """Lock a directory by a file in it.  Creates the directory if it does not exist.

    The returned function unlocks it; it is also called when `holder` is garbage.
    """
    with _with_remedy(path):
        path.mkdir(parents=True, exist_ok=True)
        file = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    unlock = weakref.finalize(holder, os.close, file)
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # on Windows there is no lock
        return unlock
    except BlockingIOError:
        unlock()
        raise ValueError(
            f"{path}: another sweep is running in this directory. Wait for its end, or choose "
            "another with --out."
        ) from None
    return unlock


@contextlib.contextmanager
def _with_remedy(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = f"cannot be written: {error.strerror}. Choose another directory with --out"
        raise OSError(error.errno, reason, str(path)) from None


def _differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    names = [n for n in names if not (n in MAY_GROW and _has_grown(before.get(n), now.get(n)))]
    return "; ".join(
        f"{name} before: {_text(before, name)}, now: {_text(now, name)}" for name in names
    )


def _has_grown(before: Any, now: Any) -> bool:
    if None in (before, now):
        return False
    return set(before) <= set(now) if isinstance(now, list) else before < now


def _text(settings: dict[str, Any], name: str) -> str:
    value = settings.get(name)
    return shlex.join(value) if value and name == "arguments" else setting_text(value)
